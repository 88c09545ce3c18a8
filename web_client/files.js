/**
 * What goes out and comes in: the visitor's picture, video and trace of the session, the link to watch.
 *
 * Owns which session they belong to.
 */

import { HttpError, download, uploadImage } from "./http.js";

export class Files {
  /**
   * @param {{connection: import("./connection.js").Connection, notice: (text: string) => void}} page
   */
  constructor(page) {
    this.page = page;
    this.session = "";
    this.imageBytes = 0;
  }

  /** @param {import("./protocol.d.ts").Welcome} welcome */
  onWelcome(welcome) {
    this.session = welcome.session;
    this.imageBytes = welcome.limits.image_bytes;
  }

  async copyWatchLink() {
    const link = `${location.origin}/?watch=${encodeURIComponent(this.session)}`;
    try {
      await navigator.clipboard.writeText(link);
      this.page.notice(`Copied: ${link}`);
    } catch {
      this.page.notice(`For who wants to watch: ${link}`);
    }
  }

  /** @param {File} picture @returns {Promise<string | null>} its id, or null after a notice */
  async upload(picture) {
    const { notice } = this.page;
    // The server would end the connection in the middle of it.
    if (picture.size > this.imageBytes) {
      notice(`Own picture: larger than ${Math.floor(this.imageBytes / 2 ** 20)} MiB`);
      return null;
    }
    notice("Own picture: uploading");
    try {
      return await uploadImage(picture);
    } catch (error) {
      notice(error instanceof HttpError ? `Own picture: ${error.message}` : "Own picture: failed");
      return null;
    }
  }

  saveVideo() {
    return this.save("recording.mp4", `${this.name}.mp4`);
  }

  /** The trace, and the picture that it names where the world began with an uploaded one. */
  async saveTrace() {
    const { image_id: imageId } = this.page.connection.wants;
    await this.save("trace.jsonl", `${this.name}.trace.jsonl`);
    if (imageId) await this.save("picture.png", `${imageId}.png`);
  }

  get name() {
    return `worldstream-${this.session.slice(0, 8)}`;
  }

  /** @param {"recording.mp4" | "trace.jsonl" | "picture.png"} file @param {string} name */
  async save(file, name) {
    try {
      await download(this.session, file, name, this.page.connection.resumeToken);
    } catch (error) {
      this.page.notice(error instanceof HttpError ? error.message : "The file cannot be saved.");
    }
  }
}
