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
import { RUNG_NAMES } from "./ladder.js";
import { Latency } from "./latency.js";
import { Overlay } from "./overlay.js";
import { Pads } from "./pads.js";
import { Presence } from "./presence.js";
import { Video } from "./video.js";
import { SLOW, shortState, wordsOfQueue, wordsOfState, wordsOfStatus } from "./words.js";
import { decodableCodecs } from "./ws_video.js";

/** @param {string} id @returns {any} */
const element = (id) => document.getElementById(id);

const WITH_WORLD = ["READY", "RUNNING", "PAUSED"];
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
let isSlow = false;
const overlay = new Overlay();
const latency = new Latency();
const pads = new Pads(element("stick-walk"), element("stick-look"));

const connection = new Connection({
  wants, caps, onStatus, onMessage, onVideo: (frame) => video.onBinary(frame),
});
const send = (/** @type {import("./protocol.d.ts").ClientMessage} */ message) => connection.send(message);
const hud = new Hud(latency, { send, dropped: () => video.dropped });
const input = new Input(element("stage"), {
  send: (act, cause) => {
    // Edges go both ways, motion the quick one, refreshes the sure one; the server takes the newest.
    const isSent = cause !== "refresh" && video.sendAct(act);
    if (cause === "edge") send(act);
    else if (cause === "refresh" || !isSent) connection.sendFresh(act);
  },
  onHeld: (held) => hud.showKeys(held),
  onEdge: (seq, atMs) => latency.onAction(seq, atMs),
  readPad: () => pads.read(),
});
const video = new Video(element("video"), element("canvas"), caps, {
  send,
  onRtpFrame: (rtp) => onShown(rtp === undefined ? null : latency.frameOfRtp(rtp)),
  onWsFrame: (frame, seq, isRepeated) => onShown(isRepeated ? null : frame, seq),
  onPicture: () => {
    overlay.notePicture();
    showState();
  },
  onRung: (rung, why) => {
    latency.forgetOrigin();
    hud.setTransport(RUNG_NAMES[rung], why);
    document.body.dataset.rung = rung;
    if (why) controls.notice(why);
    showState();
  },
});
const controls = new Controls({ connection, input, hud, isViewer, state: () => state });
const presence = new Presence({ connection, state: () => state, onSeen: () => video.onSeen() });

/** @param {number | null} frame @param {number} [seq] */
function onShown(frame, seq) {
  hud.onShown(frame);
  if (frame !== null) latency.onShown(frame, nowMs(), seq);
}

function showState() {
  if (!state || state === "QUEUED") return;
  if (isSlow && state === "RUNNING") return overlay.show(SLOW);
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const transport = RUNG_NAMES[video.rung];
  overlay.show(wordsOfState(state, reason, { hasPicture: video.hasFrame, transport, isViewer, isTouch, error }));
}

/** @param {boolean} isNow whether the next chunk takes unusually long */
function setSlow(isNow) {
  if (isNow === isSlow) return;
  isSlow = isNow;
  showState();
}

/** @param {string} newState @param {string} [newReason] */
function setState(newState, newReason = "") {
  state = newState;
  reason = newReason;
  document.body.dataset.state = state;
  overlay.setStatus(isViewer && state ? `watching, ${shortState(state)}` : shortState(state));
  input.enable(!isViewer && WITH_WORLD.includes(state));
  controls.onState(state);
}

/** @param {import("./connection.js").Status} status */
function onStatus(status) {
  video.stop();
  isSlow = false;
  setState("");
  const words = wordsOfStatus(status);
  document.body.dataset.state = status.kind;
  overlay.setStatus(words.headline.toLowerCase());
  overlay.show(words);
}

/** @param {import("./protocol.d.ts").ServerMessage} message */
function onMessage(message) {
  switch (message.t) {
    case "welcome":
      error = "";
      latency.reconnect();
      input.seq = Math.max(input.seq, message.last_seq);
      input.onLimits(message.limits);
      video.onWelcome(message);
      controls.onWelcome(message, video.rungs());
      break;
    case "queue":
      overlay.show(wordsOfQueue(message));
      break;
    case "loading":
      overlay.show(wordsOfStatus({ kind: "loading", ...message }));
      break;
    case "state":
      setState(message.state, message.reason);
      presence.onState();
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
      setSlow(false);
      latency.onChunk(message);
      break;
    case "stats":
      hud.onStats(message);
      video.onStats(message.fps_out);
      break;
    case "world":
      controls.onWorld(message.world);
      break;
    case "applied":
      controls.wishes.onApplied(message);
      break;
    case "warn":
    case "err":
      onTrouble(message);
      break;
    case "bye":
      controls.notice(message.reason);
      break;
  }
}

/** @param {import("./protocol.d.ts").Warn | import("./protocol.d.ts").Err} message */
function onTrouble(message) {
  if (message.t === "err" && message.fatal) error = message.msg;
  controls.notice(message.msg);
  if (message.code === "SLOW") setSlow(true);
  if (message.code === "RENEGOTIATE") video.renegotiate();
  if (["NOT_READY", "RATE_LIMIT"].includes(message.code)) video.onRefused(message.retry_ms ?? 1000);
  if (message.code.startsWith("RTC_")) video.onRtcError();
  showState();
}

// Where there is a world, the click goes on to the picture, which plays.
overlay.button.addEventListener("click", () => {
  if (WITH_WORLD.includes(state)) return;
  connection.connect(["FAILED", "CLOSED", "ended"].includes(document.body.dataset.state ?? ""));
  element("stage").focus();
});

element("sticks").hidden = element("keys").hidden = isViewer;
video.forced = controls.transport(query.get("transport"));
controls.onForce = (choice) => video.force(choice);
controls.load();
connection.connect();
