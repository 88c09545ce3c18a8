/**
 * Keys, mouse, touch sticks and gamepad become snapshots of what is held (`act` messages).
 *
 * Owns what is held, the edges of the last 500 ms, the sums of mouse motion. Invariants: a snapshot
 * is complete, so a lost one does no harm; nothing is sent while idle; whatever takes attention away
 * from the picture releases everything.
 */

/** Motion and refreshes together stay below the 70 snapshots a second that a session takes. */
const MOTION_MS = 25;
const EDGE_LIFE_MS = 500;

/** @typedef {import("./protocol.d.ts").Act} Act */
/** @typedef {[number, number, number, number]} Axes walk x, y, look x, y */
/** @typedef {"edge" | "motion" | "refresh"} Cause why a snapshot is sent */

/** Now on the page's wall clock, in ms: comparable with `event.timeStamp` made absolute. */
export const nowMs = () => performance.timeOrigin + performance.now();

/** @param {EventTarget | null} target */
const isEditable = (target) =>
  target instanceof HTMLElement &&
  (target.isContentEditable || target.matches("input:not([type=file]), textarea, select"));

export class Input {
  /**
   * @param {HTMLElement} stage what takes the mouse by pointer lock
   * @param {{send: (act: Act, cause: Cause) => void, onHeld: (held: ReadonlySet<string>) => void,
   *   onEdge: (seq: number, atMs: number) => void, readPad: () => Axes}} hooks
   */
  constructor(stage, hooks) {
    this.stage = stage;
    this.hooks = hooks;
    this.isEnabled = false;
    /** Codes that the server knows. @type {readonly string[]} */
    this.keys = [];
    this.refreshMs = 50;
    this.seq = 0;
    this.edgeId = 0;
    /** @type {Set<string>} */
    this.held = new Set();
    /** @type {[number, string, number, number][]} */
    this.edges = [];
    /** @type {[number, number]} */
    this.look = [0, 0];
    /** @type {Axes} */
    this.pad = [0, 0, 0, 0];
    this.sentMotion = this.motion();
    this.sentAtMs = 0;
    this.refreshedAtMs = 0;
    this.listen();
    this.tick = this.tick.bind(this);
    requestAnimationFrame(this.tick);
    this.timer = 0;
  }

  /** What the server takes, before the first snapshot. @param {import("./protocol.d.ts").Limits} limits */
  onLimits(limits) {
    this.keys = limits.keys;
    this.refreshMs = limits.key_refresh_ms;
    clearInterval(this.timer);
    // Timers go on where animation frames stop, so that a held key stays fresh.
    this.timer = setInterval(() => this.refresh(), this.refreshMs);
  }

  listen() {
    addEventListener("keydown", (event) => this.onKey(event, true));
    addEventListener("keyup", (event) => this.onKey(event, false));
    addEventListener("mousemove", (event) => {
      if (document.pointerLockElement !== this.stage || !this.isEnabled) return;
      this.look = [this.look[0] + event.movementX, this.look[1] + event.movementY];
    });
    const release = () => this.release();
    addEventListener("blur", release);
    addEventListener("pagehide", release);
    document.addEventListener("visibilitychange", () => document.hidden && release());
    document.addEventListener("pointerlockchange", () => {
      const hasMouse = document.pointerLockElement === this.stage;
      this.stage.classList.toggle("has-mouse", hasMouse);
      if (!hasMouse) release();
    });
    document.addEventListener("focusin", (event) => isEditable(event.target) && release());
    // A menu takes the keys without a blur; the command key of a Mac swallows the release of others.
    addEventListener("contextmenu", release);
    addEventListener("keydown", (event) => event.key === "Meta" && release());
  }

  /** Take the mouse; browsers that know no raw motion are asked again without it. */
  async lockPointer() {
    try {
      await this.stage.requestPointerLock({ unadjustedMovement: true });
    } catch {
      try {
        await this.stage.requestPointerLock();
      } catch {
        // Refused (no gesture, or left a moment ago): the arrow keys look round as well.
      }
    }
  }

  /** @param {boolean} isEnabled whether snapshots are sent; turning off releases everything */
  enable(isEnabled) {
    if (this.isEnabled && !isEnabled) this.release();
    this.isEnabled = isEnabled;
  }

  /** @param {KeyboardEvent} event @param {boolean} isDown */
  onKey(event, isDown) {
    if (!this.keys.includes(event.code)) return;
    if (isDown && (isEditable(event.target) || event.ctrlKey || event.altKey || event.metaKey)) return;
    if (!this.isEnabled) return;
    if (isDown) event.preventDefault();
    if (event.repeat || isDown === this.held.has(event.code)) return;
    if (isDown) this.held.add(event.code);
    else this.held.delete(event.code);
    const atMs = performance.timeOrigin + event.timeStamp;
    this.edges.push([++this.edgeId, event.code, isDown ? 1 : 0, atMs]);
    this.hooks.onHeld(this.held);
    this.send("edge");
    this.hooks.onEdge(this.seq, atMs);
  }

  /** Let go of everything and say so, once. */
  release() {
    const wasActive = this.held.size > 0 || this.pad.some(Boolean);
    this.held.clear();
    this.edges = [];
    this.pad = [0, 0, 0, 0];
    if (!wasActive) return;
    this.hooks.onHeld(this.held);
    this.send("edge");
  }

  /** Once a picture of the screen: motion of mouse, sticks and gamepad. */
  tick() {
    requestAnimationFrame(this.tick);
    if (!this.isEnabled || document.hidden || !document.hasFocus()) return;
    const wasStill = !this.pad.some(Boolean);
    this.pad = this.hooks.readPad();
    const isStart = wasStill && this.pad.some(Boolean);
    if (isStart) this.sentAtMs = 0;
    if (this.motion() === this.sentMotion || nowMs() - this.sentAtMs < MOTION_MS - 2) return;
    // A stick that is let go ends like a key: this message must not be lost.
    this.send(isStart || !this.pad.some(Boolean) !== wasStill ? "edge" : "motion");
    if (isStart) this.hooks.onEdge(this.seq, nowMs());
  }

  motion() {
    return [...this.look, ...this.pad].join();
  }

  refresh() {
    if (!this.isEnabled || (!this.held.size && !this.pad.some(Boolean))) return;
    if (nowMs() - this.refreshedAtMs >= this.refreshMs - 5) this.send("refresh");
  }

  /** @param {Cause} cause */
  send(cause) {
    if (!this.isEnabled) return;
    const ct = nowMs();
    if (cause !== "motion") this.refreshedAtMs = ct;
    this.edges = this.edges.filter(([, , , atMs]) => ct - atMs <= EDGE_LIFE_MS).slice(-32);
    this.seq += 1;
    this.sentAtMs = ct;
    this.sentMotion = this.motion();
    const { seq, look, pad, edges } = this;
    this.hooks.send({ t: "act", seq, ct, keys: [...this.held], look, pad, edges }, cause);
  }
}
