/**
 * Wires the modules of the page together.
 *
 * Owns the session's last known state and what a new session would start with.
 */

import { Connection } from "./connection.js";
import { Controls } from "./controls.js";
import { clientName } from "./http.js";
import { Hud } from "./hud.js";
import { Input, nowMs } from "./input.js";
import { Latency } from "./latency.js";
import { Pads } from "./pads.js";
import { RUNG_NAMES, Video } from "./video.js";
import { shortState, wordsOfQueue, wordsOfState, wordsOfStatus } from "./words.js";
import { decodableCodecs } from "./ws_video.js";

/** @param {string} id @returns {any} */
const element = (id) => document.getElementById(id);

/** Set while the world is paused because nobody saw it; outlives a reload. */
const HIDDEN_KEY = "worldstream.hidden";
const query = new URLSearchParams(location.search);
const watched = query.get("watch");
const isViewer = watched !== null;
const caps = {
  webrtc: "RTCPeerConnection" in globalThis,
  webcodecs: await decodableCodecs(),
  jpeg: true,
  rvfc: "requestVideoFrameCallback" in HTMLVideoElement.prototype,
};
/** @type {import("./protocol.d.ts").CreateSession} */
const wants = isViewer
  ? { role: "viewer", join: watched || undefined }
  : { role: "controller", client: clientName(), scene: query.get("scene") ?? undefined };

let state = "";
let reason = "";
let error = "";
const latency = new Latency();
const pads = new Pads(element("stick-walk"), element("stick-look"));

const connection = new Connection({ wants, caps, onStatus, onMessage, onVideo });
const send = (/** @type {import("./protocol.d.ts").ClientMessage} */ message) => connection.send(message);
const hud = new Hud(latency, { send, dropped: () => video.dropped() });
const input = new Input(element("stage"), {
  send,
  onHeld: (held) => hud.showKeys(held),
  onEdge: (seq, atMs) => latency.onAction(seq, atMs),
  readPad: () => pads.read(),
});
const video = new Video(element("video"), element("canvas"), caps, {
  send,
  onRtpFrame: (rtp) => onShown(rtp === undefined ? null : latency.frameOfRtp(rtp)),
  onWsFrame: (frame, seq, isRepeated) => onShown(isRepeated ? null : frame, seq),
  onRung: (rung, why) => {
    hud.setTransport(RUNG_NAMES[rung], why);
    document.body.dataset.rung = rung;
    if (why && why !== "chosen") controls.notice(`${why}. Now: ${RUNG_NAMES[rung]}.`);
    showState();
  },
});
const controls = new Controls({ connection, input, hud, isViewer, state: () => state });

/** @param {number | null} frame @param {number} [seq] */
function onShown(frame, seq) {
  const isFirst = element("overlay").dataset.picture !== "yes";
  element("overlay").dataset.picture = "yes";
  hud.onShown(frame);
  if (frame !== null) latency.onShown(frame, nowMs(), seq);
  if (isFirst) showState();
}

/** @param {import("./words.js").Words} words */
function show(words) {
  const { headline, detail = "", button, isLight = false, percent } = words;
  element("overlay").hidden = !headline;
  element("overlay").classList.toggle("light", isLight);
  element("headline").textContent = headline;
  element("detail").textContent = detail;
  element("progress").hidden = percent === undefined;
  if (percent !== undefined) element("progress").value = percent;
  element("overlay-button").hidden = !button;
  element("overlay-button").textContent = button ?? "";
}

function showState() {
  if (!state || state === "QUEUED") return;
  const hasPicture = element("overlay").dataset.picture === "yes" && video.hasFrame;
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const transport = RUNG_NAMES[video.rung];
  show(wordsOfState(state, reason, { hasPicture, transport, isViewer, isTouch, error }));
}

/** @param {string} newState @param {string} [newReason] */
function setState(newState, newReason = "") {
  state = newState;
  reason = newReason;
  document.body.dataset.state = state;
  element("status").textContent = isViewer && state ? `watching, ${shortState(state)}` : shortState(state);
  input.enable(!isViewer && ["READY", "RUNNING", "PAUSED"].includes(state));
  controls.onState(state);
}

/** @param {import("./connection.js").Status} status */
function onStatus(status) {
  video.stop();
  setState("");
  const words = wordsOfStatus(status);
  document.body.dataset.state = status.kind;
  element("status").textContent = words.headline.toLowerCase();
  show(words);
}

/** @param {ArrayBuffer} frame */
function onVideo(frame) {
  video.onBinary(frame);
}

/** @param {import("./protocol.d.ts").ServerMessage} message */
function onMessage(message) {
  switch (message.t) {
    case "welcome":
      error = "";
      latency.reconnect();
      input.seq = Math.max(input.seq, message.last_seq);
      video.onWelcome(message);
      controls.onWelcome(message);
      break;
    case "queue":
      show(wordsOfQueue(message));
      break;
    case "loading":
      show(wordsOfStatus({ kind: "loading", ...message }));
      break;
    case "state":
      setState(message.state, message.reason);
      resumeIfSeen();
      video.onState(message.state);
      showState();
      break;
    case "rtc.answer":
      video.onAnswer(message);
      break;
    case "rtc.origin":
      if (message.gen === video.gen) latency.origin = message.origin;
      break;
    case "pong":
      latency.onPong(message);
      break;
    case "chunk":
      latency.onChunk(message);
      break;
    case "stats":
      hud.onStats(message);
      video.onStats(message.fps_out);
      break;
    case "applied":
      controls.onApplied(message);
      break;
    case "warn":
    case "err":
      if (["NOT_READY", "RATE_LIMIT"].includes(message.code)) video.onRefused(message.retry_ms ?? 1000);
      if (message.code.startsWith("RTC_")) video.fall("no agreement");
      if (message.t === "err" && message.fatal) error = message.msg;
      controls.notice(message.msg);
      showState();
      break;
    case "bye":
      controls.notice(message.reason);
      break;
  }
}

element("overlay-button").addEventListener("click", (/** @type {Event} */ event) => {
  event.stopPropagation();
  if (state === "PAUSED") send({ t: "resume", reason: "user" });
  else connection.connect(["FAILED", "CLOSED", "ended"].includes(document.body.dataset.state ?? ""));
  element("stage").focus();
});
/** Being out of sight pauses; being seen again ends that, after a reload as well. */
function resumeIfSeen() {
  if (state === "RUNNING" && !document.hidden) sessionStorage.removeItem(HIDDEN_KEY);
  if (isViewer || document.hidden || state !== "PAUSED" || !sessionStorage.getItem(HIDDEN_KEY)) return;
  send({ t: "resume", reason: "visible" });
}
document.addEventListener("visibilitychange", () => {
  if (!isViewer && document.hidden && state === "RUNNING") {
    sessionStorage.setItem(HIDDEN_KEY, "yes");
    send({ t: "pause", reason: "hidden" });
  }
  resumeIfSeen();
});

video.forced = controls.transport(query.get("transport"));
controls.onForce = (choice) => video.force(choice);
controls.scenes.load();
connection.connect();
