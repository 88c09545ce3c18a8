/**
 * Words over the picture and in the line under the title.
 *
 * Owns the overlay's elements, nothing else: what is said comes from `words.js`.
 */

/** @param {string} id @returns {any} */
const element = (id) => document.getElementById(id);

export class Overlay {
  constructor() {
    this.root = element("overlay");
    this.button = element("overlay-button");
  }

  /** @param {import("./words.js").Words} words */
  show({ headline, detail = "", button, isLight = false, percent }) {
    this.root.hidden = !headline;
    this.root.classList.toggle("light", isLight);
    element("headline").textContent = headline;
    element("detail").textContent = detail;
    element("detail").hidden = !detail;
    element("progress").hidden = percent === undefined;
    if (percent !== undefined) element("progress").value = percent;
    this.button.hidden = !button;
    this.button.textContent = button ?? "";
  }

  /** @param {string} text */
  setStatus(text) {
    element("status").textContent = text;
  }

  /** A picture was shown. */
  notePicture() {
    this.root.dataset.picture = "yes";
  }
}
