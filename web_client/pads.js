/**
 * Touch sticks and gamepads, read as four axes: walk x and y, look x and y; right and down positive.
 *
 * Owns the sticks on the picture. Invariant: an axis inside the dead zone is exactly zero.
 */

const DEAD_ZONE = 0.15;

/** @param {number} value */
function withoutDeadZone(value) {
  const size = Math.min(Math.abs(value), 1);
  if (!(size > DEAD_ZONE)) return 0;
  return Math.round((Math.sign(value) * (size - DEAD_ZONE) * 1000) / (1 - DEAD_ZONE)) / 1000;
}

class Stick {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    this.knob = /** @type {HTMLElement} */ (element.querySelector("i"));
    this.x = 0;
    this.y = 0;
    element.addEventListener("pointerdown", (event) => {
      element.setPointerCapture(event.pointerId);
      this.follow(event);
      event.preventDefault();
    });
    element.addEventListener("pointermove", (event) => {
      if (element.hasPointerCapture(event.pointerId)) this.follow(event);
    });
    element.addEventListener("lostpointercapture", () => this.place(0, 0));
    element.addEventListener("click", (event) => event.stopPropagation());
  }

  /** @param {PointerEvent} event */
  follow(event) {
    const box = this.element.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 2 - 1;
    const y = ((event.clientY - box.top) / box.height) * 2 - 1;
    const length = Math.max(1, Math.hypot(x, y));
    this.place(x / length, y / length);
  }

  /** @param {number} x @param {number} y */
  place(x, y) {
    this.x = x;
    this.y = y;
    this.knob.style.transform = `translate(${x * 100}%, ${y * 100}%)`;
  }
}

export class Pads {
  /** @param {HTMLElement} walk @param {HTMLElement} look elements of the two sticks */
  constructor(walk, look) {
    this.walk = new Stick(walk);
    this.look = new Stick(look);
  }

  /** @returns {import("./input.js").Axes} the axes now; a stick that is touched goes before a gamepad */
  read() {
    const sticks = [this.walk.x, this.walk.y, this.look.x, this.look.y];
    const gamepad = navigator.getGamepads?.().find((pad) => pad?.connected && pad.axes.length >= 4);
    const axes = sticks.some(Boolean) || !gamepad ? sticks : gamepad.axes.slice(0, 4);
    const [walkX, walkY, lookX, lookY] = axes.map(withoutDeadZone);
    return [walkX, walkY, lookX, lookY];
  }
}
