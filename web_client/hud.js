/**
 * Figures on the picture: frame rate, action to photon, transport, chunk time, drops.
 *
 * Owns the reports of shown frames. Invariant: every number comes from frames that this page showed
 * or from the server's messages.
 */

import { nowMs } from "./input.js";
import { quantile } from "./latency.js";

/** @typedef {import("./protocol.d.ts").ClientMessage} ClientMessage */

const REPORT_LIMIT = 60;

/** @param {string} id */
const field = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** @param {number | null | undefined} ms */
const msText = (ms) => (ms === null || ms === undefined ? "-" : `${Math.round(ms)} ms`);

export class Hud {
  /**
   * @param {import("./latency.js").Latency} latency
   * @param {{send: (message: ClientMessage) => void, dropped: () => number}} hooks
   */
  constructor(latency, hooks) {
    this.latency = latency;
    this.hooks = hooks;
    this.root = field("hud");
    /** @type {number[]} */
    this.shownAtMs = [];
    /** @type {[number, number][]} */
    this.report = [];
    /** @type {number | null} */
    this.genMs = null;
    this.serverDrops = 0;
    setInterval(() => this.draw(), 500);
    setInterval(() => this.sendReport(), 1000);
  }

  toggle() {
    this.root.hidden = !this.root.hidden;
    return !this.root.hidden;
  }

  /** @param {string} name @param {string} [why] */
  setTransport(name, why = "") {
    field("hud-transport").textContent = name;
    field("hud-transport").title = why;
  }

  /** @param {import("./protocol.d.ts").Stats} stats */
  onStats(stats) {
    this.genMs = stats.gen_ms ?? null;
    this.serverDrops = stats.dropped;
  }

  /** A picture is on the screen. @param {number | null} frame its id where known */
  onShown(frame) {
    const atMs = nowMs();
    this.shownAtMs.push(atMs);
    if (this.shownAtMs.length > 240) this.shownAtMs.shift();
    if (frame !== null && this.report.length < REPORT_LIMIT) this.report.push([frame, atMs]);
  }

  sendReport() {
    if (!this.report.length) return;
    this.hooks.send({ t: "shown", frames: this.report });
    this.report = [];
  }

  draw() {
    const sinceMs = nowMs() - 1000;
    const fps = this.shownAtMs.filter((atMs) => atMs > sinceMs).length;
    const { samples, rttMs } = this.latency;
    const median = quantile(samples, 0.5);
    const p95 = quantile(samples, 0.95);
    const drops = this.serverDrops + this.hooks.dropped();
    field("hud-fps").textContent = String(fps);
    field("hud-latency").textContent =
      median === null ? "press a key" : `${msText(median)}, p95 ${msText(p95)}`;
    field("hud-chunk").textContent = msText(this.genMs);
    field("hud-drops").textContent = String(drops);
    field("hud-rtt").textContent = msText(rttMs);
    this.root.dataset.samples = String(samples.length);
  }

  /** Show keys as they are held. @param {ReadonlySet<string>} held */
  showKeys(held) {
    for (const key of document.querySelectorAll("kbd[data-code]")) {
      key.classList.toggle("held", held.has(/** @type {HTMLElement} */ (key).dataset.code ?? ""));
    }
  }
}
