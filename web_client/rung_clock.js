/**
 * How long a rung of the ladder has had, and how long its last frame is ago.
 *
 * Owns times only. Invariant: time in which nobody looks, or the server has nothing to send, does not
 * count.
 */

import { nowMs } from "./input.js";

const WS_LIMIT_MS = 5000;
const STALL_MS = 4000;
const KEY_MS = 2000;

export class RungClock {
  constructor() {
    this.hasFrame = false;
    this.sinceMs = 0;
    this.frameAtMs = 0;
    this.hasAskedForKey = false;
    /** Limits of WebRTC without and with a relay, ms. @type {number[]} */
    this.rtcLimitsMs = [3000, 5000];
  }

  /** Another rung, or the same anew. */
  begin() {
    this.hasFrame = false;
    this.resume();
  }

  /** From now on time counts. */
  resume() {
    this.sinceMs = this.frameAtMs = nowMs();
  }

  /** @returns {boolean} whether it is the first of its rung */
  onFrame() {
    const isFirst = !this.hasFrame;
    this.hasFrame = true;
    this.hasAskedForKey = false;
    this.frameAtMs = nowMs();
    return isFirst;
  }

  /** @param {import("./ladder.js").Rung} rung @returns {boolean} whether no frame came in time */
  isOverdue(rung) {
    const [direct, relay] = this.rtcLimitsMs;
    const limitMs = rung === "webrtc" ? direct : rung === "relay" ? relay : WS_LIMIT_MS;
    return !this.hasFrame && nowMs() - this.sinceMs > limitMs;
  }

  /** @returns {"fall" | "keyframe" | null} what helps while frames are sent; a keyframe helps once */
  remedy() {
    const stalledMs = this.hasFrame ? nowMs() - this.frameAtMs : 0;
    if (stalledMs > STALL_MS) return "fall";
    if (stalledMs <= KEY_MS || this.hasAskedForKey) return null;
    this.hasAskedForKey = true;
    return "keyframe";
  }
}
