/**
 * Whether somebody looks: out of sight the world pauses, seen again it goes on, gone it is left.
 *
 * Owns the note that the page itself made the pause, which outlives a reload. Invariant: a pause
 * that the player asked for is never ended here.
 */

import { session } from "./kept.js";

const HIDDEN_KEY = "worldstream.hidden";

export class Presence {
  /**
   * @param {{connection: import("./connection.js").Connection, state: () => string,
   *   onSeen: () => void}} page
   */
  constructor(page) {
    this.page = page;
    document.addEventListener("visibilitychange", () => this.onVisibility());
    // After the snapshot that lets go of all keys, which is sent by a listener of before.
    addEventListener("pagehide", () => page.connection.leave());
    addEventListener("pageshow", (event) => event.persisted && page.connection.connect());
  }

  onVisibility() {
    if (!document.hidden) this.page.onSeen();
    this.onState();
  }

  /** Call it after each change of the session's state: it may have changed out of sight. */
  onState() {
    const { connection, state } = this.page;
    if (connection.wants.role === "viewer") return;
    if (document.hidden) {
      if (state() !== "RUNNING") return;
      session.set(HIDDEN_KEY, "yes");
      connection.send({ t: "pause", reason: "hidden" });
      return;
    }
    if (state() === "RUNNING") session.remove(HIDDEN_KEY);
    if (state() !== "PAUSED" || !session.get(HIDDEN_KEY)) return;
    connection.send({ t: "resume", reason: "visible" });
  }
}
