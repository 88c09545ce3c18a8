/**
 * Buttons, prompt, own picture: what a visitor can ask for besides walking.
 *
 * Owns the ids of wishes that the server has not yet said are applied.
 */

import { HttpError, download, uploadImage } from "./http.js";
import { Scenes } from "./scenes.js";

/** @param {string} id @returns {any} */
const element = (id) => document.getElementById(id);

const WITH_WORLD = ["READY", "RUNNING", "PAUSED"];
const SEEDS = 2 ** 32;

export class Controls {
  /**
   * @param {{connection: import("./connection.js").Connection, input: import("./input.js").Input,
   *   hud: import("./hud.js").Hud, isViewer: boolean, state: () => string}} page
   */
  constructor(page) {
    this.page = page;
    this.session = "";
    this.wishId = 0;
    /** @type {Map<number, string>} */
    this.wishes = new Map();
    this.scenes = new Scenes(element("scenes"), (name, prompt) => {
      element("prompt").value = prompt;
      this.reset({ scene: name, prompt }, `Scene ${name}`);
    });
    this.listen();
    this.onState("");
  }

  listen() {
    const { connection, input } = this.page;
    const stage = element("stage");
    stage.addEventListener("click", () => {
      if (this.page.isViewer || !WITH_WORLD.includes(this.page.state())) return;
      if (this.page.state() !== "RUNNING") connection.send({ t: "resume", reason: "user" });
      stage.focus();
      if (matchMedia("(pointer: fine)").matches) input.lockPointer();
    });
    element("pause").addEventListener("click", () => this.togglePause());
    element("step").addEventListener("click", () => this.wish("step", {}, "One chunk"));
    element("reset").addEventListener("click", () => this.reset({}, "Starting again"));
    element("reseed").addEventListener("click", () => {
      this.reset({ seed: Math.floor(Math.random() * SEEDS) }, "New seed");
    });
    element("upload").addEventListener("change", () => this.upload());
    element("save-video").addEventListener("click", () => this.save("recording.mp4", `${this.fileName()}.mp4`));
    element("save-trace").addEventListener("click", () => this.saveTrace());
    element("watch").addEventListener("click", () => this.copyWatchLink());
    element("hud-toggle").addEventListener("click", () => this.toggleHud());
    element("transport").addEventListener("change", () => this.onTransport());
    element("prompt-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      const text = element("prompt").value.trim();
      connection.wants.prompt = text;
      this.wish("prompt", { text }, "New prompt");
      stage.focus();
    });
    addEventListener("keydown", (event) => {
      const isTyping = event.target instanceof HTMLElement && event.target.matches("input, select");
      if (isTyping || event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.code === "KeyP") this.togglePause();
      if (event.code === "KeyH") this.toggleHud();
    });
  }

  /** @type {(choice: import("./video.js").Rung | "auto") => void} */
  onForce = () => {};

  onTransport() {
    this.onForce(element("transport").value);
  }

  /** Take the choice from the page's address. @param {string | null} choice */
  transport(choice) {
    if (choice && element("transport").querySelector(`option[value="${CSS.escape(choice)}"]`)) {
      element("transport").value = choice;
    }
    return element("transport").value;
  }

  async copyWatchLink() {
    const link = `${location.origin}/?watch=${encodeURIComponent(this.session)}`;
    try {
      await navigator.clipboard.writeText(link);
      this.notice(`Copied: ${link}`);
    } catch {
      this.notice(`For who wants to watch: ${link}`);
    }
  }

  toggleHud() {
    element("hud-toggle").setAttribute("aria-pressed", String(this.page.hud.toggle()));
  }

  togglePause() {
    if (this.page.isViewer) return;
    const isPaused = this.page.state() === "PAUSED";
    this.page.connection.send({ t: isPaused ? "resume" : "pause", reason: "user" });
  }

  /**
   * @param {"step" | "prompt" | "reset"} t @param {object} fields
   * @param {string} title what the page calls the wish
   */
  wish(t, fields, title) {
    const id = ++this.wishId;
    const isSent = this.page.connection.send(/** @type {any} */ ({ t, id, ...fields }));
    if (isSent) this.wishes.set(id, title);
    this.notice(isSent ? `${title}: on its way` : `${title}: kept for the next connection`);
  }

  /** @param {Partial<import("./protocol.d.ts").Reset>} fields @param {string} title */
  reset(fields, title) {
    const { wants } = this.page.connection;
    Object.assign(wants, fields);
    if (fields.scene) wants.image_id = undefined;
    if (fields.image_id) wants.scene = undefined;
    this.page.input.release();
    this.wish("reset", fields, title);
    element("stage").focus();
  }

  async upload() {
    const [file] = element("upload").files;
    element("upload").value = "";
    if (!file) return;
    this.notice("Own picture: uploading");
    try {
      this.reset({ image_id: await uploadImage(file) }, "Own picture");
    } catch (error) {
      this.notice(error instanceof HttpError ? `Own picture: ${error.message}` : "Own picture: failed");
    }
  }

  fileName() {
    return `worldstream-${this.session.slice(0, 8)}`;
  }

  /** The trace, and the picture that it names where the world began with an uploaded one. */
  async saveTrace() {
    const { image_id: imageId } = this.page.connection.wants;
    await this.save("trace.jsonl", `${this.fileName()}.trace.jsonl`);
    if (imageId) await this.save("picture.png", `${imageId}.png`);
  }

  /** @param {"recording.mp4" | "trace.jsonl" | "picture.png"} file @param {string} name */
  async save(file, name) {
    try {
      await download(this.session, file, name, this.page.connection.resumeToken);
    } catch (error) {
      this.notice(error instanceof HttpError ? error.message : "The file cannot be saved.");
    }
  }

  /** @param {import("./protocol.d.ts").Welcome} welcome */
  onWelcome(welcome) {
    this.session = welcome.session;
    this.wishes.clear();
    element("prompt").maxLength = welcome.limits.prompt_chars;
    if (document.activeElement !== element("prompt")) element("prompt").value = welcome.world.prompt;
    this.scenes.mark(welcome.world.scene ?? "");
    this.scenes.load();
    const { scene, image_id, prompt, seed } = welcome.world;
    if (!this.page.isViewer) {
      Object.assign(this.page.connection.wants, {
        scene: scene ?? undefined, image_id: image_id ?? undefined, prompt, seed,
      });
    }
  }

  /** @param {import("./protocol.d.ts").Applied} applied */
  onApplied(applied) {
    const title = this.wishes.get(applied.id);
    this.wishes.delete(applied.id);
    if (title) this.notice(`${title}: done`);
  }

  /** @param {string} state of the session */
  onState(state) {
    const isOn = WITH_WORLD.includes(state) && !this.page.isViewer;
    for (const id of ["pause", "reset", "reseed", "upload"]) element(id).disabled = !isOn;
    for (const id of ["save-video", "save-trace", "watch"]) element(id).disabled = !state || this.page.isViewer;
    for (const field of element("prompt-form").elements) field.disabled = this.page.isViewer;
    this.scenes.enable(!this.page.isViewer);
    element("pause").textContent = state === "PAUSED" ? "Go on" : "Pause";
    element("step").hidden = state !== "PAUSED" || this.page.isViewer;
  }

  /** @param {string} text */
  notice(text) {
    element("notice").textContent = text;
  }
}
