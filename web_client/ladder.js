/**
 * The ladder: ways for the video, best first, and the one that worked here lately.
 *
 * Owns the names of the rungs and the note, kept for this origin for a day.
 */

import { local } from "./kept.js";

/** @typedef {"webrtc" | "relay" | "webcodecs" | "jpeg"} Rung */

const MEMORY_KEY = "worldstream.rung";
const MEMORY_MS = 24 * 3600 * 1000;

/** What the rungs are called on the page. @type {Record<Rung, string>} */
export const RUNG_NAMES = {
  webrtc: "WebRTC", relay: "WebRTC relay", webcodecs: "WebSocket H.264", jpeg: "WebSocket JPEG",
};

/**
 * @param {{webrtc: boolean, webcodecs: string[]}} caps of this browser
 * @param {RTCIceServer[]} ice of the server
 * @returns {Rung[]} rungs that both have, best first
 */
export function rungsOf(caps, ice) {
  const hasRelay = ice.some((server) => [server.urls].flat().some((url) => /^turns?:/.test(url)));
  /** @type {Rung[]} */
  const all = ["webrtc", "relay", "webcodecs", "jpeg"];
  return all.filter((rung) => {
    if (rung === "webcodecs") return caps.webcodecs.length > 0;
    return rung === "jpeg" || (caps.webrtc && (rung === "webrtc" || hasRelay));
  });
}

/** @param {Rung[]} rungs @returns {Rung} the first to try */
export function firstRung(rungs) {
  const [rung, atMs] = (local.get(MEMORY_KEY) ?? "").split(" ");
  const kept = rungs.find((each) => each === rung);
  return kept && Date.now() - Number(atMs) < MEMORY_MS ? kept : rungs[0];
}

/** A rung brought a picture. @param {Rung[]} rungs @param {Rung} rung */
export function remember(rungs, rung) {
  // The day counts from the fall, not from the last visit: the best one is tried again some time.
  if (rung === rungs[0]) forget();
  else if (rung !== firstRung(rungs)) local.set(MEMORY_KEY, `${rung} ${Date.now()}`);
}

/** The visitor chooses anew. */
export function forget() {
  local.remove(MEMORY_KEY);
}
