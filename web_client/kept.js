/**
 * What the browser keeps for the page; where it refuses (blocked cookies), kept until a reload.
 *
 * Owns the access to both storages: `local` for the origin, `session` for the tab.
 */

class Kept {
  /** @param {() => Storage} open throws where storage is blocked */
  constructor(open) {
    /** @type {Map<string, string>} */
    this.memory = new Map();
    /** @type {Storage | null} */
    this.storage = null;
    try {
      this.storage = open();
    } catch {
      // Blocked: the map does.
    }
  }

  /** @param {string} key @returns {string | null} */
  get(key) {
    return this.storage?.getItem(key) ?? this.memory.get(key) ?? null;
  }

  /** @param {string} key @param {string} value */
  set(key, value) {
    try {
      if (this.storage) return this.storage.setItem(key, value);
    } catch {
      // Full: the map does.
    }
    this.memory.set(key, value);
  }

  /** @param {string} key */
  remove(key) {
    this.storage?.removeItem(key);
    this.memory.delete(key);
  }
}

export const local = new Kept(() => localStorage);
export const session = new Kept(() => sessionStorage);
