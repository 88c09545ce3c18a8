/**
 * Words for every state of the page: what is going on, what to do.
 *
 * Owns texts only: no state, no elements.
 */

/** @typedef {{headline: string, detail?: string, button?: string, isLight?: boolean,
 *   percent?: number}} Words */

/** @type {Record<string, Words>} */
const ENDINGS = {
  IDLE: { headline: "The world was put away", detail: "Nobody played for a while.", button: "Play again" },
  GONE: { headline: "The world was put away", detail: "The connection was gone for too long.", button: "Play again" },
  MAX_DURATION: { headline: "Time is up", detail: "A session has a longest duration, so that others can play.", button: "Play again" },
  CONFLICT: { headline: "You play in another window", detail: "One window at a time has the keys.", button: "Play here" },
  GEN_INVALID: { headline: "The world stopped", detail: "The model made no valid picture.", button: "Start again" },
  BAD_IMAGE: { headline: "The world stopped", detail: "Its first picture cannot be used.", button: "Start again" },
  NO_SESSION: { headline: "This world has ended", button: "Start a new one" },
  BAD_MESSAGE: { headline: "The server did not understand this page", detail: "Reload the page; it may be older than the server.", button: "Start again" },
};

/** @type {Record<string, Words>} */
const REFUSALS = {
  QUEUE_FULL: { headline: "Busy", detail: "The queue is full. This page asks again by itself.", button: "Ask now" },
  RATE_LIMIT: { headline: "Too many tries", detail: "This page asks again in a moment.", button: "Ask now" },
  UNAUTHORIZED: { headline: "This server wants a token", detail: "Open the address that the server printed; it ends in #token=...", button: "Try again" },
  FORBIDDEN_ORIGIN: { headline: "This page may not use this server", detail: "Open the address that the server printed." },
  NO_SESSION: { headline: "There is nothing to watch", detail: "That world has ended.", button: "Try again" },
  BAD_MESSAGE: { headline: "There is no such world", detail: "The address of this page names a scene that the server does not have, or the page is older than the server.", button: "Try again" },
};

/** Why a connection ended that comes back by itself. @type {Record<string, Words>} */
const LOSSES = {
  SERVER_SHUTDOWN: { headline: "The server is closing", detail: "This page asks again until it is back." },
  WARMUP_TIMEOUT: { headline: "The world took too long to start", detail: "A new one begins." },
  GEN_TIMEOUT: { headline: "The world stopped", detail: "The model was too slow. A new world begins." },
  WORKER_DIED: { headline: "The world stopped", detail: "The process that makes it ended. A new world begins." },
  NOT_READY: { headline: "The server is not ready", detail: "It starts, closes or has no room. This page asks again by itself." },
  QUEUE_FULL: { headline: "You waited for long", detail: "This page asks for a place again." },
  RATE_LIMIT: { headline: "Too many messages", detail: "The connection is opened again in a moment." },
};

/** @type {Record<string, Words>} */
const STATES = {
  WARMING: { headline: "Starting the world" },
  READY: { headline: "Click, or press W, to walk", detail: "W A S D walk, arrows or mouse look, Esc frees the mouse.", button: "Play", isLight: true },
  RUNNING: { headline: "" },
  GRACE: { headline: "The player is gone", detail: "The world waits half a minute." },
  DRAINING: { headline: "This world is closing", detail: "Save its video or trace now." },
  FAILED: { headline: "The world stopped", button: "Start a new world" },
  CLOSED: { headline: "This world has ended", button: "Start a new one" },
};

/** @type {Record<string, string>} */
const PAUSES = {
  idle: "No key was pressed for a minute.",
  hidden: "The page was out of sight.",
};

/** While a chunk takes much longer than the ones before. @type {Words} */
export const SLOW = { headline: "The server is slow", detail: "The next pictures take longer than usual.", isLight: true };

/** @param {number} seconds */
const about = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`);

/** @param {import("./connection.js").Status} status @returns {Words} */
export function wordsOfStatus(status) {
  switch (status.kind) {
    case "connecting":
      return { headline: "Connecting" };
    case "loading": {
      const percent = Math.round(status.percent);
      const detail = `${status.stage || "Starting"}: ${percent} %, ${about(status.seconds)} so far`;
      return { headline: "The model is loading", detail, percent };
    }
    case "unreachable":
    case "lost": {
      const wait = status.retryMs < 1000 ? "Trying again now." : `Trying again in ${about(status.retryMs / 1000)}.`;
      const loss = LOSSES[status.code];
      if (loss) return { ...loss, button: "Try now" };
      if (status.kind === "unreachable") return { headline: "The server does not answer", detail: wait, button: "Try now" };
      return { headline: "Connection lost", detail: `${wait} Your world waits half a minute.`, button: "Try now" };
    }
    case "refused":
      return REFUSALS[status.code] ?? { headline: "The server said no", detail: status.code, button: "Try again" };
    case "ended":
      return ENDINGS[status.code] ?? { headline: "This world has ended", detail: status.code, button: "Start a new one" };
  }
}

/** @param {{pos: number, len: number, eta_s?: number | null}} queue @returns {Words} */
export function wordsOfQueue({ pos, len, eta_s: etaS }) {
  const wait = etaS === null || etaS === undefined ? "" : `, about ${about(etaS)}`;
  return { headline: `You are number ${pos} of ${len} in the queue${wait}`, detail: "Stay here: the world starts by itself." };
}

/**
 * @param {string} state of the session @param {string} reason
 * @param {{hasPicture: boolean, transport: string, isViewer: boolean, isTouch: boolean,
 *   error: string}} page
 * @returns {Words}
 */
export function wordsOfState(state, reason, page) {
  if (["READY", "RUNNING", "PAUSED"].includes(state) && !page.hasPicture) {
    return { headline: "Waiting for the picture", detail: page.transport };
  }
  if (page.isViewer && state === "READY") return { headline: "Waiting for the player", isLight: true };
  if (page.isTouch && state === "READY") return { headline: "Touch a stick to walk", button: "Play", isLight: true };
  if (state === "PAUSED") {
    const detail = page.isViewer ? "by the player" : PAUSES[reason] ?? "";
    return { headline: "Paused", detail, button: page.isViewer ? undefined : "Go on", isLight: true };
  }
  if (state === "FAILED") return { ...STATES.FAILED, detail: page.error };
  return STATES[state] ?? { headline: state };
}

/** @param {string} state @returns {string} for the line under the title */
export function shortState(state) {
  /** @type {Record<string, string>} */
  const texts = {
    QUEUED: "queued", WARMING: "starting", READY: "ready", RUNNING: "playing", PAUSED: "paused",
    GRACE: "waiting for the player", DRAINING: "closing", FAILED: "stopped", CLOSED: "ended",
  };
  return texts[state] ?? state.toLowerCase();
}
