/**
 * Video that comes over the WebSocket: whole frames behind a 32-byte header, drawn on a canvas.
 *
 * Owns the decoder. Invariants: every frame is acknowledged once, drawn or not, because the server
 * sends no more than its window; after an error nothing is decoded before the next keyframe.
 */

import { nowMs } from "./input.js";

/** @typedef {import("./protocol.d.ts").ClientMessage} ClientMessage */
/** @typedef {{codec: number, isKey: boolean, isRepeated: boolean, frame: number, seq: number,
 *   width: number, height: number, payload: Uint8Array}} Packet */

const HEADER_BYTES = 32;
const CODECS = new Map([[1, "avc1.42E01F"], [2, "vp8"]]);
const JPEG = 3;
const QUEUE_LIMIT = 2;
/** More errors than this in so much time, and another way is taken. */
const ERROR_LIMIT = 2;
const ERRORS_MS = 10_000;

/** @param {ArrayBuffer} buffer @returns {Packet | null} null for what is no frame */
export function parsePacket(buffer) {
  if (buffer.byteLength < HEADER_BYTES) return null;
  const view = new DataView(buffer);
  const length = view.getUint32(28, true);
  if (view.getUint8(0) !== 1 || buffer.byteLength < HEADER_BYTES + length) return null;
  const flags = view.getUint8(2);
  return {
    codec: view.getUint8(1), isKey: (flags & 1) !== 0, isRepeated: (flags & 4) !== 0,
    frame: view.getUint32(4, true), seq: view.getUint32(8, true),
    width: view.getUint16(24, true), height: view.getUint16(26, true),
    payload: new Uint8Array(buffer, HEADER_BYTES, length),
  };
}

/** @returns {Promise<string[]>} WebCodecs codecs that this browser decodes */
export async function decodableCodecs() {
  if (!isSecureContext || !("VideoDecoder" in globalThis)) return [];
  const found = [];
  for (const codec of CODECS.values()) {
    const { supported } = await VideoDecoder.isConfigSupported({ codec }).catch(() => ({ supported: false }));
    if (supported) found.push(codec);
  }
  return found;
}

export class WsVideo {
  /**
   * @param {{canvas: HTMLCanvasElement, send: (message: ClientMessage) => void,
   *   onFrame: (packet: Packet) => void, onFailed: (why: string) => void}} options
   */
  constructor(options) {
    this.options = options;
    this.context = /** @type {CanvasRenderingContext2D} */ (options.canvas.getContext("2d", { alpha: false }));
    /** @type {VideoDecoder | null} */
    this.decoder = null;
    /** @type {Map<number, Packet>} */
    this.decoding = new Map();
    /** What the next picture of the screen will show. @type {Packet | null} */
    this.drawn = null;
    this.needsKey = true;
    this.dropped = 0;
    /** Times of the last errors, ms. @type {number[]} */
    this.errorsMs = [];
    this.serial = 0;
    this.isBusy = false;
    this.isClosed = false;
  }

  /** @param {ArrayBuffer} buffer */
  push(buffer) {
    const packet = parsePacket(buffer);
    if (!packet || this.isClosed) return;
    if (packet.codec === JPEG) this.drawJpeg(packet);
    else this.decode(packet);
  }

  /** @param {Packet} packet */
  async drawJpeg(packet) {
    if (this.isBusy) return this.drop(packet);
    this.isBusy = true;
    try {
      const bitmap = await createImageBitmap(new Blob([/** @type {any} */ (packet.payload)]));
      this.draw(packet, bitmap);
      bitmap.close();
    } catch {
      this.drop(packet);
    }
    this.isBusy = false;
  }

  /** @param {Packet} packet */
  decode(packet) {
    if (this.needsKey && !packet.isKey) return this.drop(packet);
    if ((this.decoder?.decodeQueueSize ?? 0) > QUEUE_LIMIT) return this.restart("queue", packet);
    try {
      this.decoder ??= this.open(packet);
      const timestamp = ++this.serial;
      this.decoding.set(timestamp, packet);
      const type = packet.isKey ? "key" : "delta";
      this.decoder.decode(new EncodedVideoChunk({ type, timestamp, data: packet.payload }));
      this.needsKey = false;
    } catch {
      this.restart("error", null);
    }
  }

  /** @param {Packet} packet @returns {VideoDecoder} */
  open(packet) {
    const decoder = new VideoDecoder({
      output: (image) => {
        const shown = this.decoding.get(image.timestamp);
        this.decoding.delete(image.timestamp);
        if (shown) this.draw(shown, image);
        image.close();
      },
      error: () => this.decoder === decoder && this.restart("error", null),
    });
    decoder.configure({ codec: CODECS.get(packet.codec) ?? "", optimizeForLatency: true });
    return decoder;
  }

  /** @param {"queue" | "error"} reason @param {Packet | null} packet frame that is not decoded */
  restart(reason, packet) {
    const decoder = this.decoder;
    this.decoder = null;
    if (decoder && decoder.state !== "closed") decoder.close();
    for (const lost of this.decoding.values()) this.drop(lost);
    this.decoding.clear();
    if (packet) this.drop(packet);
    this.needsKey = true;
    if (reason === "error") this.errorsMs.push(nowMs());
    this.errorsMs = this.errorsMs.filter((atMs) => nowMs() - atMs < ERRORS_MS);
    if (this.errorsMs.length > ERROR_LIMIT) return this.options.onFailed("cannot be decoded");
    this.options.send({ t: "kf", reason });
  }

  /** @param {Packet} packet @param {CanvasImageSource} image */
  draw(packet, image) {
    if (this.isClosed) return;
    const { canvas } = this.options;
    if (canvas.width !== packet.width || canvas.height !== packet.height) {
      canvas.width = packet.width;
      canvas.height = packet.height;
    }
    this.context.drawImage(image, 0, 0, canvas.width, canvas.height);
    this.options.send({ t: "ack", frame: packet.frame, drawn_ct: nowMs() });
    if (this.drawn) this.dropped += 1; // painted over before the screen had it
    else requestAnimationFrame(() => this.onScreen());
    this.drawn = packet;
  }

  onScreen() {
    const { drawn } = this;
    this.drawn = null;
    if (drawn && !this.isClosed) this.options.onFrame(drawn);
  }

  /** @param {Packet} packet */
  drop(packet) {
    this.dropped += 1;
    this.options.send({ t: "ack", frame: packet.frame });
  }

  close() {
    this.isClosed = true;
    if (this.decoder && this.decoder.state !== "closed") this.decoder.close();
    this.decoder = null;
  }
}
