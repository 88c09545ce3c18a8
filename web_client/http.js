/**
 * HTTP side of the service: info, readiness, sessions, pictures, downloads.
 *
 * Owns the name of this browser, and the access token, which comes from the page's fragment
 * (`#token=...`) and is never put into a URL that is sent.
 */

import { local, session } from "./kept.js";

/** @typedef {import("./protocol.d.ts").ServiceInfo} ServiceInfo */
/** @typedef {import("./protocol.d.ts").CreateSession} CreateSession */
/** @typedef {import("./protocol.d.ts").SessionCreated} SessionCreated */

/** Answer that says no; `code` is the protocol's, or "UNREACHABLE". */
export class HttpError extends Error {
  /** @param {string} code @param {string} message @param {number} [retryMs] */
  constructor(code, message, retryMs) {
    super(message);
    this.code = code;
    this.retryMs = retryMs;
  }
}

const TOKEN_KEY = "worldstream.token";
const CLIENT_KEY = "worldstream.client";

/** @returns {string | null} */
function accessToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) session.set(TOKEN_KEY, given);
  return session.get(TOKEN_KEY);
}

/** @param {string} path @param {RequestInit} [init] @param {string | null} [bearer] */
async function request(path, init = {}, bearer = accessToken()) {
  const headers = new Headers(init.headers);
  if (bearer) headers.set("Authorization", `Bearer ${bearer}`);
  let response;
  try {
    response = await fetch(path, { ...init, headers, cache: "no-store" });
  } catch {
    throw new HttpError("UNREACHABLE", "The server does not answer.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new HttpError(body.code ?? `HTTP_${response.status}`, body.msg ?? "", body.retry_ms);
}

/** @returns {Promise<ServiceInfo>} */
export const info = async () => (await request("/v1/info")).json();

/**
 * @returns {Promise<import("./protocol.d.ts").Loading | null>} how far loading is; null when done
 */
export async function loading() {
  const response = await fetch("/readyz", { cache: "no-store" }).catch(() => null);
  if (!response) throw new HttpError("UNREACHABLE", "The server does not answer.");
  if (response.ok) return null;
  const body = await response.json().catch(() => ({}));
  if (!body.loading) throw new HttpError("NOT_READY", "The server is not ready.");
  return body.loading;
}

/** A name of this browser, so that its new session takes the old one's place. */
export function clientName() {
  const kept = local.get(CLIENT_KEY);
  if (kept) return kept;
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  const name = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  local.set(CLIENT_KEY, name);
  return name;
}

/** @param {CreateSession} body @returns {Promise<SessionCreated>} */
export async function createSession(body) {
  const headers = { "Content-Type": "application/json" };
  return (await request("/v1/sessions", { method: "POST", headers, body: JSON.stringify(body) })).json();
}

/** @param {Blob} picture @returns {Promise<string>} its id */
export async function uploadImage(picture) {
  const headers = { "Content-Type": picture.type };
  const answer = await request("/v1/images", { method: "POST", headers, body: picture });
  return (await answer.json()).image_id;
}

/**
 * Hand a file of the session to the browser's downloads.
 *
 * @param {string} sessionId @param {"recording.mp4" | "trace.jsonl" | "picture.png"} file
 * @param {string} name it is saved under
 * @param {string | null} bearer token of the session
 */
export async function download(sessionId, file, name, bearer) {
  const path = `/v1/sessions/${encodeURIComponent(sessionId)}/${file}`;
  const blob = await (await request(path, {}, bearer)).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
