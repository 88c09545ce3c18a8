/**
 * The picture: WebRTC where it works, else down the ladder to video over the WebSocket.
 *
 * Owns the rung in use and the generation numbers. Invariants: one rung at a time; the clock of a
 * rung runs only while the server has frames to send; a forced rung is never left.
 */

import { nowMs } from "./input.js";
import { RtcVideo } from "./webrtc.js";
import { WsVideo } from "./ws_video.js";

/** @typedef {"webrtc" | "relay" | "webcodecs" | "jpeg"} Rung */
/** @typedef {import("./protocol.d.ts").ClientMessage} ClientMessage */
/** @typedef {import("./protocol.d.ts").Welcome} Welcome */

const WITH_FRAMES = ["READY", "RUNNING", "PAUSED"];
const WITH_MEDIA = ["WARMING", ...WITH_FRAMES];
const WS_LIMIT_MS = 5000;
const STALL_MS = 4000;
const MEMORY_KEY = "worldstream.rung";
const MEMORY_MS = 24 * 3600 * 1000;

/** What the rungs are called on the page. @type {Record<Rung, string>} */
export const RUNG_NAMES = {
  webrtc: "WebRTC", relay: "WebRTC relay", webcodecs: "WebSocket H.264", jpeg: "WebSocket JPEG",
};

export class Video {
  /**
   * @param {HTMLVideoElement} video @param {HTMLCanvasElement} canvas
   * @param {{webrtc: boolean, webcodecs: string[]}} caps
   * @param {{send: (message: ClientMessage) => void, onRtpFrame: (rtp?: number) => void,
   *   onWsFrame: (frame: number, seq: number, isRepeated: boolean) => void,
   *   onRung: (rung: Rung, why: string) => void}} hooks
   */
  constructor(video, canvas, caps, hooks) {
    this.video = video;
    this.canvas = canvas;
    this.caps = caps;
    this.hooks = hooks;
    /** @type {Rung | "auto"} */
    this.forced = "auto";
    /** @type {Rung} */
    this.rung = "webrtc";
    /** @type {RtcVideo | null} */
    this.rtc = null;
    /** @type {WsVideo | null} */
    this.ws = null;
    this.gen = 0;
    this.state = "";
    this.isStarted = false;
    this.hasFrame = false;
    this.rungSinceMs = 0;
    this.frameAtMs = 0;
    /** @type {RTCIceServer[]} */
    this.ice = [];
    this.ladderMs = [3000, 5000];
    setInterval(() => this.check(), 250);
  }

  /** @returns {Rung[]} rungs that this browser and server have, best first */
  rungs() {
    const hasRelay = this.ice.some((server) => [server.urls].flat().some((url) => /^turns?:/.test(url)));
    /** @type {Rung[]} */
    const all = ["webrtc", "relay", "webcodecs", "jpeg"];
    return all.filter((rung) => {
      if (rung === "webcodecs") return this.caps.webcodecs.length > 0;
      return rung === "jpeg" || (this.caps.webrtc && (rung === "webrtc" || hasRelay));
    });
  }

  /** A new socket: media starts afresh once the session has a world. @param {Welcome} welcome */
  onWelcome(welcome) {
    this.ice = /** @type {RTCIceServer[]} */ ([...welcome.ice]);
    this.ladderMs = welcome.limits.ladder_s.map((seconds) => seconds * 1000);
    this.isStarted = false;
  }

  /** @param {string} state of the session */
  onState(state) {
    const had = WITH_FRAMES.includes(this.state);
    this.state = state;
    if (WITH_FRAMES.includes(state) && !had) this.rungSinceMs = nowMs();
    if (!this.isStarted && WITH_MEDIA.includes(state)) this.start(this.firstRung(), "");
  }

  /** @returns {Rung} */
  firstRung() {
    if (this.forced !== "auto") return this.forced;
    const kept = JSON.parse(localStorage.getItem(MEMORY_KEY) ?? "null");
    const isFresh = kept && Date.now() - kept.atMs < MEMORY_MS && this.rungs().includes(kept.rung);
    return isFresh ? kept.rung : this.rungs()[0];
  }

  /** The user's choice. @param {Rung | "auto"} choice */
  force(choice) {
    this.forced = choice;
    localStorage.removeItem(MEMORY_KEY);
    if (this.isStarted) this.start(this.firstRung(), "chosen");
  }

  /** @param {Rung} rung @param {string} why */
  start(rung, why) {
    this.stop();
    this.isStarted = true;
    this.rung = rung;
    this.hasFrame = false;
    this.rungSinceMs = nowMs();
    const isRtc = rung === "webrtc" || rung === "relay";
    this.video.hidden = !isRtc;
    this.canvas.hidden = isRtc;
    this.hooks.onRung(rung, why);
    const onFailed = () => this.fall("failed");
    const { send } = this.hooks;
    if (isRtc) {
      send({ t: "media", transport: "webrtc" });
      this.rtc = new RtcVideo({
        gen: ++this.gen, video: this.video, iceServers: this.ice, isRelay: rung === "relay",
        send, onFailed,
        onFrame: (rtp) => {
          this.onFrame();
          this.hooks.onRtpFrame(rtp);
        },
      });
      this.rtc.offer().catch(onFailed);
      return;
    }
    const onFrame = (/** @type {import("./ws_video.js").Packet} */ packet) => {
      this.onFrame();
      this.hooks.onWsFrame(packet.frame, packet.seq, packet.isRepeated);
    };
    this.ws = new WsVideo({ canvas: this.canvas, send, onFrame, onFailed });
    const h264OrVp8 = this.caps.webcodecs.some((codec) => codec.startsWith("avc1")) ? "h264" : "vp8";
    send({ t: "media", transport: "ws", codec: rung === "jpeg" ? "jpeg" : h264OrVp8 });
  }

  onFrame() {
    this.hasFrame = true;
    this.frameAtMs = nowMs();
  }

  /** @param {ArrayBuffer} buffer */
  onBinary(buffer) {
    this.ws?.push(buffer);
  }

  /** @param {import("./protocol.d.ts").RtcAnswer} answer */
  onAnswer(answer) {
    if (answer.gen === this.gen) this.rtc?.answer(answer.sdp).catch(() => this.fall("failed"));
  }

  /** The server refused, for now. @param {number} retryMs */
  onRefused(retryMs) {
    const { rtc } = this;
    if (!rtc || rtc.isAnswered) return;
    setTimeout(() => rtc === this.rtc && !rtc.isAnswered && this.start(this.rung, ""), retryMs);
  }

  /** @param {number} fpsOut frames a second that the server says it sends */
  onStats(fpsOut) {
    if (!this.hasFrame || fpsOut < 5 || document.hidden) return;
    if (nowMs() - this.frameAtMs > STALL_MS) this.fall("no frames");
  }

  /** Fall where the rung brought no frame in its time. */
  check() {
    if (!this.isStarted || this.hasFrame || document.hidden || !WITH_FRAMES.includes(this.state)) return;
    const limits = { webrtc: this.ladderMs[0], relay: this.ladderMs[1] };
    const limitMs = this.rung in limits ? limits[/** @type {"relay"} */ (this.rung)] : WS_LIMIT_MS;
    if (nowMs() - this.rungSinceMs > limitMs) this.fall("no frames in time");
  }

  /** One rung down, and remember it. @param {string} why */
  fall(why) {
    const rungs = this.rungs();
    const next = rungs[rungs.indexOf(this.rung) + 1];
    if (this.forced !== "auto" || !this.isStarted) return;
    // The last rung is tried again: there is nothing below it.
    this.start(next ?? this.rung, `${RUNG_NAMES[this.rung]}: ${why}`);
    if (next) localStorage.setItem(MEMORY_KEY, JSON.stringify({ rung: next, atMs: Date.now() }));
  }

  /** The socket is gone: the last picture stays on the screen. */
  stop() {
    this.isStarted = false;
    this.rtc?.close();
    this.ws?.close();
    this.rtc = this.ws = null;
  }

  /** @returns {Promise<number>} frames that arrived here and were not shown */
  async dropped() {
    return (await this.rtc?.dropped()) ?? this.ws?.dropped ?? 0;
  }
}
