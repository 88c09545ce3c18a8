/**
 * The way to a ticket: wait until the model is loaded, then the session of before or a new one.
 *
 * Owns nothing that lasts.
 */

import { HttpError, createSession, loading } from "./http.js";
import { nowMs } from "./input.js";

/** @typedef {import("./protocol.d.ts").CreateSession} CreateSession */
/** @typedef {import("./protocol.d.ts").SessionCreated} SessionCreated */

const LOADING_POLL_MS = 500;

/**
 * Wait until the model is loaded.
 *
 * @param {(progress: {stage: string, percent: number, seconds: number}) => boolean | void} onProgress
 *   false ends the wait
 */
export async function loaded(onProgress) {
  const beganMs = nowMs();
  for (;;) {
    const progress = await loading();
    if (progress === null) return;
    const { stage, percent } = progress;
    const seconds = Math.max(progress.seconds, (nowMs() - beganMs) / 1000);
    if (onProgress({ stage, percent, seconds }) === false) return;
    await new Promise((resolve) => setTimeout(resolve, LOADING_POLL_MS));
  }
}

/**
 * The session of before where there is one, else a new one with the same wishes.
 *
 * @param {CreateSession} wants
 * @param {string | null} resumeToken
 * @returns {Promise<SessionCreated>}
 */
export async function admit(wants, resumeToken) {
  if (resumeToken) {
    try {
      return await createSession({ role: "controller", resume: resumeToken, client: wants.client });
    } catch (error) {
      if (!hasCode(error, ["NO_SESSION", "UNAUTHORIZED"])) throw error;
    }
  }
  try {
    return await createSession(wants);
  } catch (error) {
    if (!wants.image_id || !hasCode(error, ["BAD_IMAGE"])) throw error;
    // Uploaded pictures are kept for an hour only: a world from a scene is better than none.
    wants.image_id = undefined;
    return createSession(wants);
  }
}

/** @param {unknown} error @param {string[]} codes */
const hasCode = (error, codes) => error instanceof HttpError && codes.includes(error.code);
