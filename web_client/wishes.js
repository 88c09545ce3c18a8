/**
 * What the player wishes of the world: another prompt, picture, seed, one chunk.
 *
 * Owns the ids of wishes that the server has not yet said are applied, and the newest wish that found
 * no connection. Invariant: what was asked for in vain is asked again in the same world, once; a new
 * world begins with it.
 */

/** @typedef {import("./protocol.d.ts").Reset} Reset */
/** @typedef {import("./protocol.d.ts").WorldInfo} WorldInfo */

export class Wishes {
  /**
   * @param {{connection: import("./connection.js").Connection, notice: (text: string) => void}} page
   */
  constructor(page) {
    this.page = page;
    this.id = 0;
    /** @type {Map<number, string>} */
    this.titles = new Map();
    /** @type {{t: "prompt" | "reset", fields: object, title: string} | null} */
    this.kept = null;
    this.session = "";
  }

  /** @param {string} text */
  prompt(text) {
    this.page.connection.wants.prompt = text;
    this.ask("prompt", { text }, "New prompt");
  }

  /** @param {Partial<Reset>} fields @param {string} title */
  reset(fields, title) {
    const { wants } = this.page.connection;
    Object.assign(wants, fields);
    if (fields.scene) wants.image_id = undefined;
    if (fields.image_id) wants.scene = undefined;
    this.ask("reset", fields, title);
  }

  step() {
    this.ask("step", {}, "One chunk");
  }

  /**
   * @param {"step" | "prompt" | "reset"} t @param {object} fields
   * @param {string} title what the page calls the wish
   */
  ask(t, fields, title) {
    const id = ++this.id;
    const isSent = this.page.connection.send(/** @type {any} */ ({ t, id, ...fields }));
    if (isSent) this.titles.set(id, title);
    else if (t !== "step") this.kept = { t, fields, title };
    this.page.notice(isSent ? `${title}: on its way` : `${title}: kept for the next connection`);
  }

  /** @param {string} session that the page is connected to now */
  onWelcome(session) {
    this.titles.clear();
    if (session !== this.session) this.kept = null;
    this.session = session;
  }

  /** A session that took this one's place would begin like this. @param {WorldInfo} world */
  onWorld(world) {
    const { wants } = this.page.connection;
    if (this.kept || wants.role === "viewer") return;
    const { scene, image_id, prompt, seed } = world;
    Object.assign(wants, {
      scene: scene ?? undefined, image_id: image_id ?? undefined, prompt, seed,
    });
  }

  /** The session takes wishes now. */
  askAgain() {
    const { kept } = this;
    this.kept = null;
    if (kept) this.ask(kept.t, kept.fields, kept.title);
  }

  /** @param {import("./protocol.d.ts").Applied} applied */
  onApplied({ id }) {
    const title = this.titles.get(id);
    this.titles.delete(id);
    if (title) this.page.notice(`${title}: done`);
  }
}
