/**
 * The session's WebSocket: tickets, heartbeats, reconnecting with back-off to the same world.
 *
 * Owns the socket and the resume token. Invariants: one socket at a time; nothing that was not sent
 * is kept for the next socket; a socket that is silent for 10 s is given up.
 */

import { admit, loaded } from "./admission.js";
import { HttpError } from "./http.js";
import { nowMs } from "./input.js";
import { session } from "./kept.js";

/** @typedef {import("./protocol.d.ts").ServerMessage} ServerMessage */
/** @typedef {import("./protocol.d.ts").ClientMessage} ClientMessage */
/** @typedef {import("./protocol.d.ts").CreateSession} CreateSession */
/** @typedef {{kind: "unreachable" | "lost", code: string, retryMs: number} | {kind: "connecting"}
 *   | {kind: "loading", stage: string, percent: number, seconds: number}
 *   | {kind: "refused", code: string, retryMs?: number} | {kind: "ended", code: string}} Status */

const BACKOFF_MS = [250, 500, 1000, 2000, 4000];
const DEAD_MS = 10_000;
const NO_RETRY = new Map([
  [4400, "BAD_MESSAGE"], [4404, "NO_SESSION"], [4408, "IDLE"], [4409, "CONFLICT"],
  [4410, "GONE"], [4411, "MAX_DURATION"],
]);
/** Ends that a new try would only repeat: the page asks first. */
const ASK_FIRST = ["GEN_INVALID", "BAD_IMAGE"];
const CLOSED_CLEANLY = 1000;
const UNAUTHORIZED = 4401;
/** More than this waiting in the socket means that it is stuck: a snapshot sent now would be stale. */
const STUCK_BYTES = 4096;
const RESUME_KEY = "worldstream.resume";

export class Connection {
  /**
   * @param {{wants: CreateSession, caps: object, onStatus: (status: Status) => void,
   *   onMessage: (message: ServerMessage) => void, onVideo: (frame: ArrayBuffer) => void}} options
   */
  constructor(options) {
    this.options = options;
    /** What a new session starts with; kept up to date by the page. */
    this.wants = options.wants;
    /** @type {WebSocket | null} */
    this.socket = null;
    this.resumeToken = options.wants.role === "viewer" ? null : session.get(RESUME_KEY);
    this.failures = 0;
    this.refusedTickets = 0;
    this.run = 0;
    this.heardMs = 0;
    this.pingId = 0;
    this.pingedMs = 0;
    this.heartbeatMs = 2000;
    this.endCode = "";
    this.waitMs = 0;
    setInterval(() => this.beat(), 1000);
  }

  get isOpen() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  /** Start, or start over at once. @param {boolean} [isNewWorld] leave the old world behind */
  async connect(isNewWorld = false) {
    const run = ++this.run;
    if (isNewWorld) this.keepResume(null);
    this.close();
    try {
      const { onStatus } = this.options;
      // Who comes back has a place already, and waits for nobody else's.
      if (!this.resumeToken) {
        await loaded((progress) => run === this.run && onStatus({ kind: "loading", ...progress }));
      }
      if (run !== this.run) return;
      onStatus({ kind: "connecting" });
      const made = await admit(this.wants, this.resumeToken);
      if (run === this.run) this.open(made);
    } catch (error) {
      if (run !== this.run) return;
      const { code, retryMs } = error instanceof HttpError ? error : new HttpError("INTERNAL", "");
      if (["UNREACHABLE", "NOT_READY", "INTERNAL"].includes(code)) this.retry("unreachable", code, retryMs);
      else this.refuse(code, retryMs);
    }
  }

  /** @param {import("./protocol.d.ts").SessionCreated} made */
  open(made) {
    this.keepResume(made.resume_token ?? null);
    const url = new URL(made.ws_url, location.href);
    url.protocol = url.protocol.replace("http", "ws");
    const socket = new WebSocket(url, ["wm.v1", `ticket.${made.ticket}`]);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    this.heardMs = nowMs();
    this.endCode = "";
    this.waitMs = 0;
    socket.onopen = () => {
      const viewport = [Math.round(innerWidth), Math.round(innerHeight)];
      const ua = navigator.userAgent.slice(0, 512);
      this.send(/** @type {any} */ ({ t: "hello", ver: 1, caps: this.options.caps, viewport, ua }));
      for (let i = 0; i < 10; i += 1) setTimeout(() => this.ping(), 50 * i);
    };
    socket.onmessage = (event) => {
      this.heardMs = nowMs();
      if (typeof event.data !== "string") return this.options.onVideo(event.data);
      /** @type {ServerMessage} */
      const message = JSON.parse(event.data);
      if (message.t === "welcome") {
        this.failures = this.refusedTickets = 0;
        this.heartbeatMs = message.hb_ms;
        this.keepResume(message.resume_token ?? this.resumeToken);
      }
      if (message.t === "bye") this.endCode = message.code;
      if (message.t === "err" && message.code === "RATE_LIMIT") this.waitMs = message.retry_ms ?? 0;
      this.options.onMessage(message);
    };
    socket.onclose = (event) => socket === this.socket && this.onClosed(event.code);
  }

  /** @param {number} closeCode */
  onClosed(closeCode) {
    this.socket = null;
    if (closeCode === UNAUTHORIZED && ++this.refusedTickets > 1) return this.refuse("UNAUTHORIZED");
    const isFinal = ASK_FIRST.includes(this.endCode) || closeCode === CLOSED_CLEANLY;
    const code = isFinal ? this.endCode : NO_RETRY.get(closeCode);
    if (code === undefined) return this.retry("lost", this.endCode, this.waitMs);
    if (code !== "CONFLICT") this.keepResume(null);
    this.options.onStatus({ kind: "ended", code: this.endCode || code });
  }

  /** @param {"lost" | "unreachable"} kind @param {string} code @param {number} [leastMs] */
  retry(kind, code, leastMs = 0) {
    const base = BACKOFF_MS[Math.min(this.failures, BACKOFF_MS.length - 1)];
    this.failures += 1;
    const retryMs = Math.max(base * (0.8 + 0.4 * Math.random()), leastMs);
    const run = this.run;
    this.options.onStatus({ kind, code, retryMs });
    setTimeout(() => run === this.run && this.connect(), retryMs);
  }

  /** @param {string} code @param {number} [retryMs] */
  refuse(code, retryMs) {
    this.options.onStatus({ kind: "refused", code, retryMs });
    const run = this.run;
    if (code !== "QUEUE_FULL" && code !== "RATE_LIMIT") return;
    setTimeout(() => run === this.run && this.connect(), Math.max(retryMs ?? 5000, 1000));
  }

  /** @param {string | null} token */
  keepResume(token) {
    this.resumeToken = token;
    if (this.wants.role === "viewer") return;
    if (token) session.set(RESUME_KEY, token);
    else session.remove(RESUME_KEY);
  }

  /** @param {ClientMessage} message @returns {boolean} whether it went out */
  send(message) {
    if (!this.isOpen) return false;
    this.socket?.send(JSON.stringify(message));
    return true;
  }

  /** Send what the next one replaces; left out where the socket is stuck. @param {ClientMessage} act */
  sendFresh(act) {
    if ((this.socket?.bufferedAmount ?? 0) <= STUCK_BYTES) this.send(act);
  }

  /** The page goes away: its place is free soon, but a reload finds its world again. */
  leave() {
    this.run += 1;
    this.send({ t: "bye" });
    this.close();
  }

  ping() {
    this.pingedMs = nowMs();
    this.send({ t: "ping", id: ++this.pingId, ct: nowMs() });
  }

  beat() {
    if (!this.socket) return;
    const isQuiet = nowMs() - this.heardMs > 1500;
    if (isQuiet || nowMs() - this.pingedMs > this.heartbeatMs - 100) this.ping();
    if (nowMs() - this.heardMs < DEAD_MS) return;
    const socket = this.socket;
    this.onClosed(1006);
    socket.close();
  }

  close() {
    const socket = this.socket;
    this.socket = null;
    socket?.close(1000);
  }
}
