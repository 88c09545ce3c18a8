/**
 * The picture: WebRTC where it works, else down the ladder to video over the WebSocket.
 *
 * Owns the rung in use and the generation numbers. Invariants: one rung at a time; the clock of a
 * rung runs only while the server has frames to send and somebody looks; a forced rung is never left,
 * only tried again.
 */

import { RUNG_NAMES, firstRung, forget, remember, rungsOf } from "./ladder.js";
import { RungClock } from "./rung_clock.js";
import { RtcVideo } from "./webrtc.js";
import { WsVideo } from "./ws_video.js";

/** @typedef {import("./ladder.js").Rung} Rung */
/** @typedef {import("./protocol.d.ts").ClientMessage} ClientMessage */
/** @typedef {import("./protocol.d.ts").Welcome} Welcome */

const WITH_FRAMES = ["READY", "RUNNING", "PAUSED"];
/** Less is a picture that is only repeated. */
const PLAYING_FPS = 5;
const WITH_MEDIA = ["WARMING", ...WITH_FRAMES];

export class Video {
  /**
   * @param {HTMLVideoElement} video @param {HTMLCanvasElement} canvas
   * @param {{webrtc: boolean, webcodecs: string[]}} caps
   * @param {{send: (message: ClientMessage) => void, onRtpFrame: (rtp?: number) => void,
   *   onWsFrame: (frame: number, seq: number, isRepeated: boolean) => void,
   *   onPicture: () => void, onRung: (rung: Rung, why: string) => void}} hooks
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
    this.clock = new RungClock();
    /** @type {RTCIceServer[]} */
    this.ice = [];
    setInterval(() => this.check(), 250);
  }

  rungs() {
    return rungsOf(this.caps, this.ice);
  }

  /** A new socket: media starts afresh once the session has a world. @param {Welcome} welcome */
  onWelcome(welcome) {
    this.ice = /** @type {RTCIceServer[]} */ ([...welcome.ice]);
    this.clock.rtcLimitsMs = welcome.limits.ladder_s.map((seconds) => seconds * 1000);
    this.isStarted = false;
  }

  /** @param {string} state of the session */
  onState(state) {
    const had = WITH_FRAMES.includes(this.state);
    this.state = state;
    if (WITH_FRAMES.includes(state) && !had) this.clock.resume();
    if (!this.isStarted && WITH_MEDIA.includes(state)) this.start(this.firstRung(), "");
  }

  /** @returns {Rung} */
  firstRung() {
    return this.forced === "auto" ? firstRung(this.rungs()) : this.forced;
  }

  /** The user's choice. @param {Rung | "auto"} choice */
  force(choice) {
    this.forced = choice;
    forget();
    if (this.isStarted) this.start(this.firstRung(), "");
  }

  /** The server sends nothing over the connection that there is. */
  renegotiate() {
    if (this.isStarted) this.start(this.rung, "");
  }

  /** @param {Rung} rung @param {string} why words for the visitor, if any */
  start(rung, why) {
    this.stop();
    this.isStarted = true;
    this.rung = rung;
    this.clock.begin();
    const isRtc = rung === "webrtc" || rung === "relay";
    this.video.hidden = !isRtc;
    this.canvas.hidden = isRtc;
    this.hooks.onRung(rung, why);
    const onFailed = (/** @type {string} */ why) => this.fall(why);
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
      this.rtc.offer().catch(() => this.fall("failed"));
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
    if (!this.clock.onFrame()) return;
    this.hooks.onPicture();
    if (this.forced === "auto") remember(this.rungs(), this.rung);
  }

  /** The page is looked at again. */
  onSeen() {
    this.clock.resume();
  }

  get hasFrame() {
    return this.clock.hasFrame;
  }

  /** @param {ArrayBuffer} buffer */
  onBinary(buffer) {
    this.ws?.push(buffer);
  }

  /** Second path for actions. @param {import("./protocol.d.ts").Act} act @returns {boolean} */
  sendAct(act) {
    return this.rtc?.sendAct(act) ?? false;
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

  /** WebRTC failed, as the server says. */
  onRtcError() {
    if (this.rtc) this.fall("no agreement");
  }

  /** @param {number} fpsOut frames a second that the server says it sends */
  onStats(fpsOut) {
    this.rtc?.poll().catch(() => {});
    if (fpsOut < PLAYING_FPS || document.hidden) return;
    const remedy = this.clock.remedy();
    if (remedy === "fall") this.fall("no frames");
    if (remedy === "keyframe") this.hooks.send({ t: "kf", reason: "stall" });
  }

  /** Fall where the rung brought no frame in its time. */
  check() {
    if (!this.isStarted || document.hidden || !WITH_FRAMES.includes(this.state)) return;
    if (!this.clock.isOverdue(this.rung)) return;
    if (this.forced === "auto") this.fall("no frames in time");
    else this.start(this.rung, `${RUNG_NAMES[this.rung]}: no frames in time. Trying again.`);
  }

  /** One rung down; the last one and a forced one are tried again. @param {string} why */
  fall(why) {
    if (!this.isStarted) return;
    if (this.forced !== "auto") {
      // Not at once: what fails at once would fail again and again.
      this.clock.hasFrame = false;
      return;
    }
    const rungs = this.rungs();
    const next = rungs[rungs.indexOf(this.rung) + 1] ?? this.rung;
    this.start(next, `${RUNG_NAMES[this.rung]}: ${why}. Now: ${RUNG_NAMES[next]}.`);
  }

  /** The socket is gone: the last picture stays on the screen. */
  stop() {
    this.isStarted = false;
    this.rtc?.close();
    this.ws?.close();
    this.rtc = this.ws = null;
  }

  /** Frames that arrived here and were not shown. */
  get dropped() {
    return (this.rtc ?? this.ws)?.dropped ?? 0;
  }
}
