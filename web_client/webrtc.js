/**
 * One WebRTC connection that receives the video.
 *
 * Owns one `RTCPeerConnection` under its generation number. Invariant: messages of other generations
 * are not for it.
 */

/** @typedef {import("./protocol.d.ts").ClientMessage} ClientMessage */

const GATHER_MS = 500;
const hasFrameCallbacks = "requestVideoFrameCallback" in HTMLVideoElement.prototype;

export class RtcVideo {
  /**
   * @param {{gen: number, video: HTMLVideoElement, iceServers: RTCIceServer[], isRelay: boolean,
   *   send: (message: ClientMessage) => void, onFrame: (rtp: number | undefined) => void,
   *   onFailed: () => void}} options
   */
  constructor(options) {
    this.options = options;
    this.isClosed = false;
    this.isOffered = false;
    this.isAnswered = false;
    const { gen, send } = options;
    this.peer = new RTCPeerConnection({
      iceServers: options.iceServers,
      bundlePolicy: "max-bundle",
      iceTransportPolicy: options.isRelay ? "relay" : "all",
    });
    this.peer.ontrack = ({ streams, track, receiver }) => {
      if ("jitterBufferTarget" in receiver) receiver.jitterBufferTarget = 0;
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
      if (this.peer.connectionState === "failed") options.onFailed();
    };
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

  /** Frames that arrived and were not shown. @returns {Promise<number>} */
  async dropped() {
    let count = 0;
    (await this.peer.getStats()).forEach((/** @type {any} */ report) => {
      if (report.type === "inbound-rtp") count += report.framesDropped ?? 0;
    });
    return count;
  }

  close() {
    this.isClosed = true;
    this.peer.close();
  }
}
