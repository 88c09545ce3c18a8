/**
 * One WebRTC connection that receives the video, with a channel for actions.
 *
 * Owns one `RTCPeerConnection` under its generation number, and how long pictures are held against
 * jitter. Invariant: messages of other generations are not for it.
 */

/** @typedef {import("./protocol.d.ts").ClientMessage} ClientMessage */

const GATHER_MS = 500;
/** Pictures are held only on links whose jitter makes them uneven; the two limits keep it from swinging. */
const ROUGH_MS = 30;
const SMOOTH_MS = 15;
const HOLD_MS = [50, 100];
const hasFrameCallbacks = "requestVideoFrameCallback" in HTMLVideoElement.prototype;

/**
 * Whether this browser will not reach any address of the answer. Firefox pairs no loopback address of
 * the other side with its own, which it takes from the network: there is no need to wait for that.
 *
 * @param {string} sdp
 */
function isHopeless(sdp) {
  const addresses = [...sdp.matchAll(/^a=candidate:(?:\S+ ){4}(\S+) /gm)].map((match) => match[1]);
  const areLoopback = addresses.every((address) => address.startsWith("127.") || address === "::1");
  return navigator.userAgent.includes("Firefox/") && addresses.length > 0 && areLoopback;
}

export class RtcVideo {
  /**
   * @param {{gen: number, video: HTMLVideoElement, iceServers: RTCIceServer[], isRelay: boolean,
   *   send: (message: ClientMessage) => void, onFrame: (rtp: number | undefined) => void,
   *   onFailed: (why: string) => void}} options
   */
  constructor(options) {
    this.options = options;
    this.isClosed = false;
    this.isOffered = false;
    this.isAnswered = false;
    this.dropped = 0;
    this.holdMs = 0;
    /** @type {RTCRtpReceiver | null} */
    this.receiver = null;
    const { gen, send } = options;
    this.peer = new RTCPeerConnection({
      iceServers: options.iceServers,
      bundlePolicy: "max-bundle",
      iceTransportPolicy: options.isRelay ? "relay" : "all",
    });
    this.channel = this.peer.createDataChannel("act", { ordered: false, maxRetransmits: 0 });
    this.peer.ontrack = ({ streams, track, receiver }) => {
      this.receiver = receiver;
      this.hold(0);
      options.video.srcObject = streams[0] ?? new MediaStream([track]);
      options.video.play().catch(() => {});
      this.watch();
    };
    this.peer.onicecandidate = ({ candidate }) => {
      if (!candidate?.candidate || !this.isOffered) return;
      const { sdpMid: mid, sdpMLineIndex: mline } = candidate;
      send({ t: "rtc.candidate", gen, candidate: candidate.candidate, mid, mline });
    };
    this.peer.onconnectionstatechange = () => {
      if (this.isClosed) return;
      send({ t: "rtc.state", gen, state: this.peer.connectionState });
      if (this.peer.connectionState === "failed") options.onFailed("failed");
    };
  }

  /**
   * Send a snapshot that may be lost; none waits behind another.
   *
   * @param {import("./protocol.d.ts").Act} act @returns {boolean} whether the channel took it
   */
  sendAct(act) {
    if (this.channel.readyState !== "open" || this.channel.bufferedAmount) return false;
    this.channel.send(JSON.stringify(act));
    return true;
  }

  async offer() {
    this.peer.addTransceiver("video", { direction: "recvonly" });
    await this.peer.setLocalDescription();
    await Promise.race([this.gathered(), new Promise((resolve) => setTimeout(resolve, GATHER_MS))]);
    if (this.isClosed) return;
    this.isOffered = true;
    const sdp = this.peer.localDescription?.sdp ?? "";
    this.options.send({ t: "rtc.offer", gen: this.options.gen, sdp });
  }

  gathered() {
    return new Promise((resolve) => {
      const check = () => this.peer.iceGatheringState === "complete" && resolve(null);
      this.peer.addEventListener("icegatheringstatechange", check);
      check();
    });
  }

  /** @param {string} sdp */
  async answer(sdp) {
    if (this.isClosed || this.isAnswered) return;
    this.isAnswered = true;
    if (isHopeless(sdp)) return this.options.onFailed("no address that this browser reaches");
    await this.peer.setRemoteDescription({ type: "answer", sdp });
  }

  watch() {
    const { video, onFrame } = this.options;
    if (!hasFrameCallbacks) {
      video.addEventListener("timeupdate", () => this.isClosed || onFrame(undefined));
      return;
    }
    /** @param {number} _now @param {{rtpTimestamp?: number}} metadata */
    const shown = (_now, metadata) => {
      if (this.isClosed) return;
      video.requestVideoFrameCallback(shown);
      onFrame(metadata.rtpTimestamp);
    };
    video.requestVideoFrameCallback(shown);
  }

  /** Take the browser's figures: drops, and jitter, which decides how long pictures are held. */
  async poll() {
    for (const [, report] of /** @type {Map<string, any>} */ (await this.peer.getStats())) {
      if (report.type !== "inbound-rtp") continue;
      this.dropped = report.framesDropped ?? 0;
      const jitterMs = (report.jitter ?? 0) * 1000;
      if (jitterMs > ROUGH_MS) this.hold(Math.min(Math.max(2 * jitterMs, HOLD_MS[0]), HOLD_MS[1]));
      else if (jitterMs < SMOOTH_MS) this.hold(0);
    }
  }

  /** @param {number} ms how long the browser holds a picture */
  hold(ms) {
    this.holdMs = ms;
    if (this.receiver && "jitterBufferTarget" in this.receiver) this.receiver.jitterBufferTarget = ms;
  }

  close() {
    this.isClosed = true;
    this.peer.close();
  }
}
