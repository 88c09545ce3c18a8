/**
 * The row of scenes with their thumbnails.
 *
 * Owns its buttons. Invariant: the scene of the world that is shown is marked, none for an own picture.
 */

import { info } from "./http.js";

export class Scenes {
  /** @param {HTMLElement} row @param {(name: string, prompt: string) => void} onChoice */
  constructor(row, onChoice) {
    this.row = row;
    this.onChoice = onChoice;
    this.current = "";
    /** @type {Map<string, string>} */
    this.prompts = new Map();
    this.isEnabled = true;
  }

  /** Once; a service that is down is asked again with the next call. */
  async load() {
    if (this.row.children.length) return;
    const service = await info().catch(() => null);
    if (!service || this.row.children.length) return;
    this.prompts = new Map(service.scenes.map(({ name, prompt }) => [name, prompt]));
    this.row.append(...service.scenes.map((scene) => this.button(scene)));
    this.mark(this.current);
    this.enable(this.isEnabled);
  }

  /** @param {import("./protocol.d.ts").SceneInfo} scene */
  button({ name, prompt, thumbnail }) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.scene = name;
    button.title = prompt;
    const picture = document.createElement("img");
    picture.src = thumbnail;
    picture.alt = "";
    picture.loading = "lazy";
    const label = document.createElement("span");
    label.textContent = name.replaceAll("-", " ");
    button.append(picture, label);
    button.addEventListener("click", () => {
      this.mark(name);
      this.onChoice(name, prompt);
    });
    return button;
  }

  /** @param {string} name @returns {string} what a world looks like that begins there; "" if unknown */
  promptOf(name) {
    return this.prompts.get(name) ?? "";
  }

  buttons() {
    return /** @type {HTMLButtonElement[]} */ ([...this.row.children]);
  }

  /** @param {string} name */
  mark(name) {
    this.current = name;
    for (const button of this.buttons()) {
      button.setAttribute("aria-pressed", String(button.dataset.scene === name));
    }
  }

  /** @param {boolean} isEnabled */
  enable(isEnabled) {
    this.isEnabled = isEnabled;
    for (const button of this.buttons()) button.disabled = !isEnabled;
  }
}
