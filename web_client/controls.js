/**
 * Buttons, prompt, own picture: what a visitor can ask for besides walking.
 *
 * Owns the elements below the picture. Invariant: what would be refused now is switched off.
 */

import { Files } from "./files.js";
import { Scenes } from "./scenes.js";
import { Wishes } from "./wishes.js";

/** @param {string} id @returns {any} */
const element = (id) => document.getElementById(id);

const WITH_WORLD = ["READY", "RUNNING", "PAUSED"];
/** States in which a wish reaches the world, or without a connection the next one. */
const TAKES_WISHES = ["", "WARMING", ...WITH_WORLD];
const WITH_FILES = [...WITH_WORLD, "DRAINING"];
const SEEDS = 2 ** 32;

export class Controls {
  /**
   * @param {{connection: import("./connection.js").Connection, input: import("./input.js").Input,
   *   hud: import("./hud.js").Hud, isViewer: boolean, state: () => string}} page
   */
  constructor(page) {
    this.page = page;
    /** @type {import("./protocol.d.ts").WorldInfo | null} */
    this.world = null;
    this.files = new Files({ connection: page.connection, notice: this.notice });
    this.wishes = new Wishes({ connection: page.connection, notice: this.notice });
    this.scenes = new Scenes(element("scenes"), (name, prompt) => {
      element("prompt").value = prompt;
      this.reset({ scene: name, prompt }, `Scene ${name}`);
    });
    element("fullscreen").hidden = !document.fullscreenEnabled;
    this.listen();
    this.onState("");
  }

  listen() {
    /** @type {Record<string, () => void>} */
    const clicks = {
      stage: () => this.play(),
      pause: () => this.togglePause(),
      step: () => this.wishes.step(),
      reset: () => this.reset({}, "Starting again"),
      reseed: () => this.reset({ seed: Math.floor(Math.random() * SEEDS) }, "New seed"),
      "save-video": () => this.files.saveVideo(),
      "save-trace": () => this.files.saveTrace(),
      watch: () => this.files.copyWatchLink(),
      fullscreen: () => this.toggleFullscreen(),
      "hud-toggle": () => this.toggleHud(),
    };
    for (const [id, act] of Object.entries(clicks)) element(id).addEventListener("click", act);
    element("upload").addEventListener("change", async () => {
      const [file] = element("upload").files;
      element("upload").value = "";
      const id = file && (await this.files.upload(file));
      if (id) this.reset({ image_id: id }, "Own picture");
    });
    element("transport").addEventListener("change", () => {
      this.onForce(element("transport").value);
      element("stage").focus();
    });
    element("prompt-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.wishes.prompt(element("prompt").value.trim());
      element("stage").focus();
    });
    addEventListener("keydown", (event) => {
      const isTyping = event.target instanceof HTMLElement && event.target.matches("input, select");
      if (isTyping || event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.code === "KeyP") this.togglePause();
      if (event.code === "KeyH") this.toggleHud();
      if (event.code === "KeyF") this.toggleFullscreen();
    });
  }

  /** @type {(choice: import("./ladder.js").Rung | "auto") => void} */
  onForce = () => {};

  /** Take the choice from the page's address. @param {string | null} choice */
  transport(choice) {
    if (choice && element("transport").querySelector(`option[value="${CSS.escape(choice)}"]`)) {
      element("transport").value = choice;
    }
    return element("transport").value;
  }

  /** A click on the picture. */
  play() {
    if (this.page.isViewer || !WITH_WORLD.includes(this.page.state())) return;
    if (this.page.state() !== "RUNNING") this.page.connection.send({ t: "resume", reason: "user" });
    element("stage").focus();
    if (matchMedia("(pointer: fine)").matches) this.page.input.lockPointer();
  }

  toggleHud() {
    element("hud-toggle").setAttribute("aria-pressed", String(this.page.hud.toggle()));
  }

  async toggleFullscreen() {
    if (!document.fullscreenEnabled) return;
    if (document.fullscreenElement) await document.exitFullscreen();
    else await element("play").requestFullscreen().catch(() => {});
    element("stage").focus();
  }

  togglePause() {
    if (this.page.isViewer) return;
    const isPaused = this.page.state() === "PAUSED";
    this.page.connection.send({ t: isPaused ? "resume" : "pause", reason: "user" });
  }

  /** @param {Partial<import("./protocol.d.ts").Reset>} fields @param {string} title */
  reset(fields, title) {
    this.page.input.release();
    this.wishes.reset(fields, title);
    element("stage").focus();
  }

  /** Scenes, and the prompt of the one that is shown. */
  async load() {
    await this.scenes.load();
    this.showWorld();
  }

  /**
   * @param {import("./protocol.d.ts").Welcome} welcome
   * @param {import("./ladder.js").Rung[]} rungs that can be chosen
   */
  onWelcome(welcome, rungs) {
    this.files.onWelcome(welcome);
    this.wishes.onWelcome(welcome.session);
    element("prompt").maxLength = welcome.limits.prompt_chars;
    for (const option of element("transport").options) {
      option.disabled = option.value !== "auto" && !rungs.includes(option.value);
    }
    const { w, h } = welcome.video;
    document.documentElement.style.setProperty("--ratio", String(w / h));
    this.onWorld(welcome.world);
    this.load();
  }

  /** @param {import("./protocol.d.ts").WorldInfo} world that is shown */
  onWorld(world) {
    this.world = world;
    this.wishes.onWorld(world);
    this.showWorld();
  }

  showWorld() {
    if (!this.world || this.wishes.kept) return;
    const { scene, prompt } = this.world;
    const field = element("prompt");
    if (document.activeElement !== field) field.value = prompt || this.scenes.promptOf(scene ?? "");
    this.scenes.mark(scene ?? "");
  }

  /** @param {string} state of the session; empty without a connection */
  onState(state) {
    const { isViewer } = this.page;
    const isOn = WITH_WORLD.includes(state) && !isViewer;
    if (isOn) this.wishes.askAgain();
    for (const id of ["pause", "reset", "reseed", "upload"]) element(id).disabled = !isOn;
    for (const id of ["save-video", "save-trace"]) element(id).disabled = !WITH_FILES.includes(state) || isViewer;
    element("watch").disabled = !isOn;
    const takesWishes = TAKES_WISHES.includes(state) && !isViewer;
    for (const field of element("prompt-form").elements) field.disabled = !takesWishes;
    this.scenes.enable(takesWishes);
    element("pause").textContent = state === "PAUSED" ? "Go on" : "Pause";
    element("step").hidden = state !== "PAUSED" || isViewer;
  }

  /** @type {(text: string) => void} */
  notice = (text) => {
    element("notice").textContent = text;
  };
}
