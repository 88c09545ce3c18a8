/**
 * When each action reached the screen, from frame ids and times alone; no pixels are read.
 *
 * Owns the clock offset to the server, the table of chunks, the actions that no frame has shown yet.
 * Invariant: action and frame are timed by one clock, the page's, so no offset enters a latency.
 */

import { nowMs } from "./input.js";

/** @typedef {import("./protocol.d.ts").Chunk} Chunk */

const CHUNKS_KEPT = 8;
const SAMPLES_KEPT = 120;
const RTTS_KEPT = 50;
const OBSERVATIONS = 8;
const WRAP = 2 ** 32;

/** @param {readonly number[]} values @param {number} part 0 to 1 @returns {number | null} */
export function quantile(values, part) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];
}

/** @param {Chunk} chunk @param {number} i */
const ptsOf = (chunk, i) => chunk.pts?.[i] ?? chunk.pts0 + i * (chunk.dpts ?? 0);

export class Latency {
  constructor() {
    /** By the id of the first frame, which no reset brings back. @type {Map<number, Chunk>} */
    this.chunks = new Map();
    /** @type {number | null} */
    this.origin = null;
    /** @type {number[]} RTP timestamps seen while the origin is unknown */
    this.observed = [];
    /** @type {{seq: number, atMs: number}[]} */
    this.waiting = [];
    /** Action to photon, ms. @type {number[]} */
    this.samples = [];
    /** @type {{rtt: number, offset: number}[]} */
    this.pongs = [];
    this.epoch = 0;
  }

  /** Forget the old connection; samples stay. */
  reconnect() {
    this.forgetOrigin();
    this.waiting = [];
    this.pongs = [];
    this.chunks.clear();
  }

  /** Other media begin, whose RTP timestamps count from elsewhere. */
  forgetOrigin() {
    this.origin = null;
    this.observed = [];
  }

  /** @param {{ct: number, st: number}} pong */
  onPong({ ct, st }) {
    const c1 = nowMs();
    this.pongs.push({ rtt: c1 - ct, offset: st - (ct + c1) / 2 });
    if (this.pongs.length > RTTS_KEPT) this.pongs.shift();
  }

  get rttMs() {
    return quantile(this.pongs.map((pong) => pong.rtt), 0.5);
  }

  /** Server clock minus page clock: median over the fastest fifth. */
  get offsetMs() {
    const fastest = [...this.pongs].sort((a, b) => a.rtt - b.rtt);
    const fifth = fastest.slice(0, Math.ceil(fastest.length / 5));
    return quantile(fifth.map((pong) => pong.offset), 0.5);
  }

  /** @param {number} seq snapshot that carries the action @param {number} atMs time of the event */
  onAction(seq, atMs) {
    this.waiting.push({ seq, atMs });
    if (this.waiting.length > 64) this.waiting.shift();
  }

  /** @param {Chunk} chunk */
  onChunk(chunk) {
    if (chunk.epoch !== this.epoch) this.waiting = [];
    this.epoch = chunk.epoch;
    this.chunks.delete(chunk.first);
    this.chunks.set(chunk.first, chunk);
    const [oldest] = this.chunks.keys();
    if (this.chunks.size > CHUNKS_KEPT) this.chunks.delete(oldest);
  }

  /** @param {number} rtp @returns {number | null} frame id; null where no chunk names the time */
  frameOfRtp(rtp) {
    if (this.origin === null) this.findOrigin(rtp);
    if (this.origin === null) return null;
    const pts = (rtp - this.origin + 2 * WRAP) % WRAP;
    for (const chunk of this.chunks.values()) {
      for (let i = 0; i < chunk.n; i += 1) {
        // Times in the picture's metadata may be rounded: half a millisecond is far below a frame.
        if (Math.abs(ptsOf(chunk, i) - pts) <= 45) return chunk.first + i;
      }
    }
    return null;
  }

  /** The one offset that maps what was seen onto announced times. @param {number} rtp */
  findOrigin(rtp) {
    this.observed = [...this.observed.slice(1 - OBSERVATIONS), rtp];
    if (this.observed.length < OBSERVATIONS) return;
    const announced = new Set();
    for (const chunk of this.chunks.values()) {
      for (let i = 0; i < chunk.n; i += 1) announced.add(ptsOf(chunk, i));
    }
    const fits = [...announced]
      .map((pts) => (rtp - pts + 2 * WRAP) % WRAP)
      .filter((origin) => this.observed.every((seen) => announced.has((seen - origin + WRAP) % WRAP)));
    if (fits.length === 1) this.origin = fits[0];
  }

  /** @param {number} frame @returns {number} newest action that the frame shows; 0 for none */
  actionOf(frame) {
    for (const chunk of this.chunks.values()) {
      const i = frame - chunk.first;
      if (i < 0 || i >= chunk.n) continue;
      return (chunk.act ?? []).reduce((seq, [from, last]) => (from <= i ? last : seq), 0);
    }
    return 0;
  }

  /** @param {number} frame @param {number} atMs when it was on the screen @param {number} [seq] */
  onShown(frame, atMs, seq = this.actionOf(frame)) {
    const done = this.waiting.filter((action) => action.seq <= seq);
    if (!done.length) return;
    this.waiting = this.waiting.filter((action) => action.seq > seq);
    this.samples.push(...done.map((action) => atMs - action.atMs));
    this.samples = this.samples.slice(-SAMPLES_KEPT);
  }
}
