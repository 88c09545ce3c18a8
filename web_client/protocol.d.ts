// Made by stream/typescript.py from the messages of stream/ (wm.v1).

/** A WebSocket video frame was drawn or dropped. */
export interface Ack {
  t: "ack";
  frame: number;
  drawn_ct?: number | null;
}

/** State of all controls; a later one makes a lost one harmless. */
export interface Act {
  t: "act";
  seq: number;
  ct: number;
  keys?: string[];
  look?: [number, number];
  pad?: [number, number, number, number];
  edges?: [number, string, number, number][];
}

/** A wish took effect at this chunk; after a reset frames of earlier epochs never come. */
export interface Applied {
  t: "applied";
  id: number;
  chunk: number;
  epoch: number;
}

/** What the browser can do. */
export interface Caps {
  webrtc?: boolean;
  webcodecs?: string[];
  jpeg?: boolean;
  rvfc?: boolean;
}

/** Comes before the first frame of a chunk, and again where its due times move. */
export interface Chunk {
  t: "chunk";
  k: number;
  epoch: number;
  first: number;
  n: number;
  pts0: number;
  dpts?: number | null;
  pts?: number[] | null;
  act?: [number, number][] | null;
  times: ChunkTimes;
}

/** Frames in the first and in each later chunk. */
export interface ChunkInfo {
  first: number;
  next: number;
}

/** Server times of a chunk, ms; `latch` pairs a frame offset with a time. */
export interface ChunkTimes {
  latch: [number, number][];
  gen0: number;
  gen1?: number | null;
  enq: number;
  due: number;
}

/** Clean leave. */
export interface ClientBye {
  t: "bye";
}

/** Body of `POST /v1/sessions`. */
export interface CreateSession {
  role?: "controller" | "viewer";
  join?: string | null;
  scene?: string | null;
  image_id?: string | null;
  prompt?: string | null;
  seed?: number | null;
  resume?: string | null;
  client?: string | null;
}

/** A refused message, or with `fatal` the end of the session. */
export interface Err {
  t: "err";
  code: ErrorCode;
  msg: string;
  retry_ms?: number | null;
  fatal: boolean;
}

/** Body of every HTTP error. */
export interface ErrorBody {
  code: ErrorCode;
  msg: string;
  retry_ms?: number | null;
  id?: string | null;
}

/** What went wrong, in HTTP answers, `err` messages and closed sockets. */
export type ErrorCode = "BAD_MESSAGE" | "UNAUTHORIZED" | "FORBIDDEN_ORIGIN" | "NOT_CONTROLLER" | "NO_SESSION" | "CONFLICT" | "TOO_LARGE" | "BAD_IMAGE" | "RATE_LIMIT" | "QUEUE_FULL" | "INTERNAL" | "NOT_READY" | "RTC_TIMEOUT" | "RTC_CODEC" | "RTC_FAILED" | "IDLE" | "GONE" | "MAX_DURATION" | "SERVER_SHUTDOWN" | "WARMUP_TIMEOUT" | "GEN_TIMEOUT" | "GEN_INVALID" | "WORKER_DIED";

/** First message of a socket, within 5 s. */
export interface Hello {
  t: "hello";
  ver: number;
  caps?: Caps;
  viewport: [number, number];
  ua?: string;
}

/** As `RTCIceServer`. */
export interface IceServer {
  urls: string[];
  username?: string | null;
  credential?: string | null;
}

/** Wish for a keyframe. */
export interface Kf {
  t: "kf";
  reason?: string;
}

/** What the server accepts. */
export interface Limits {
  keys: string[];
  prompt_chars: number;
  message_bytes: number;
  image_bytes: number;
  key_refresh_ms: number;
  key_stale_ms: number;
  ladder_s: [number, number];
}

/** Progress of the model's loading and warm-up. */
export interface Loading {
  t: "loading";
  stage: string;
  percent: number;
  seconds: number;
}

/** Choice of the transport. With "webrtc" an offer follows; with "ws" frames follow at once. */
export interface Media {
  t: "media";
  transport: "webrtc" | "ws";
  codec?: "h264" | "vp8" | "jpeg" | null;
}

/** Stop the world until `resume`. */
export interface Pause {
  t: "pause";
  reason?: string;
}

/** Question for the server's clock. */
export interface Ping {
  t: "ping";
  id: number;
  ct: number;
}

/** Answer to `ping`. */
export interface Pong {
  t: "pong";
  id: number;
  ct: number;
  st: number;
}

/** New prompt from the next chunk on; answered by `applied`. */
export interface Prompt {
  t: "prompt";
  text: string;
  id: number;
}

/** Place in the queue, from 1. */
export interface Queue {
  t: "queue";
  pos: number;
  len: number;
  eta_s?: number | null;
}

/** Start the world anew; what is not named stays as it was. Answered by `applied`. */
export interface Reset {
  t: "reset";
  id: number;
  scene?: string | null;
  image_id?: string | null;
  seed?: number | null;
  prompt?: string | null;
}

/** Go on. */
export interface Resume {
  t: "resume";
  reason?: string;
}

/** SDP answer and the codec that was agreed on. */
export interface RtcAnswer {
  t: "rtc.answer";
  gen: number;
  sdp: string;
  codec: string;
}

/** One more ICE candidate of the client. */
export interface RtcCandidate {
  t: "rtc.candidate";
  gen: number;
  candidate: string;
  mid?: string | null;
  mline?: number | null;
}

/** SDP offer; `gen` rises with each. */
export interface RtcOffer {
  t: "rtc.offer";
  gen: number;
  sdp: string;
}

/** RTP timestamp = origin + pts90 mod 2^32. */
export interface RtcOrigin {
  t: "rtc.origin";
  gen: number;
  origin: number;
}

/** Change of `RTCPeerConnection.connectionState`. */
export interface RtcState {
  t: "rtc.state";
  gen: number;
  state: "new" | "connecting" | "connected" | "disconnected" | "failed" | "closed";
}

/** A named scene to start from. */
export interface SceneInfo {
  name: string;
  prompt: string;
  thumbnail: string;
}

/** Last message before the server closes the socket. */
export interface ServerBye {
  t: "bye";
  code: ErrorCode;
  reason: string;
  resume: boolean;
}

/** Answer to `GET /v1/info`. */
export interface ServiceInfo {
  protocols: string[];
  version: string;
  preset: string;
  source: "model" | "renderer";
  video: VideoInfo;
  chunk: ChunkInfo;
  latch_ms: number;
  transports: string[];
  codecs: string[];
  ice: IceServer[];
  limits: Limits;
  scenes: SceneInfo[];
  needs_token: boolean;
  is_ready: boolean;
  loading?: Loading | null;
}

/** Answer to `POST /v1/sessions`. */
export interface SessionCreated {
  session_id: string;
  role: "controller" | "viewer";
  ticket: string;
  resume_token?: string | null;
  ws_url: string;
  state: SessionState;
  queue_pos?: number | null;
  expires_at: number;
}

/** States of a session; the table is in `stream.session_states`. */
export type SessionState = "QUEUED" | "WARMING" | "READY" | "RUNNING" | "PAUSED" | "GRACE" | "DRAINING" | "FAILED" | "CLOSED";

/** Answer to `GET /v1/sessions/{id}`. */
export interface SessionStatus {
  session_id: string;
  state: SessionState;
  reason: string;
  queue_pos?: number | null;
  viewers: number;
  last_error?: ErrorCode | null;
  world: WorldInfo;
}

/** Frames that were presented, once a second. */
export interface Shown {
  t: "shown";
  frames: [number, number][];
}

/** The session's state changed. */
export interface State {
  t: "state";
  state: SessionState;
  reason: string;
  since: number;
}

/** Once a second. */
export interface Stats {
  t: "stats";
  gen_ms?: number | null;
  queue_frames: number;
  fps_out: number;
  encode_ms?: number | null;
  kbps: number;
  act_lag_ms?: number | null;
  dropped: number;
  viewers: number;
}

/** Make one chunk while paused; answered by `applied`. */
export interface Step {
  t: "step";
  id: number;
}

/** Size and clock of the frames. */
export interface VideoInfo {
  w: number;
  h: number;
  fps: number;
}

/** Something the player should know; the session goes on. */
export interface Warn {
  t: "warn";
  code: string;
  msg: string;
  retry_ms?: number | null;
}

/** Answer to `hello`. */
export interface Welcome {
  t: "welcome";
  session: string;
  role: "controller" | "viewer";
  resume_token?: string | null;
  video: VideoInfo;
  chunk: ChunkInfo;
  latch_ms: number;
  ice: IceServer[];
  limits: Limits;
  world: WorldInfo;
  last_seq: number;
  hb_ms: number;
  st: number;
}

/** The world of the session is another one than the viewer was told last. */
export interface World {
  t: "world";
  world: WorldInfo;
}

/** The world of a session, as a page needs it after it connects again. */
export interface WorldInfo {
  scene?: string | null;
  image_id?: string | null;
  prompt: string;
  seed: number;
  epoch: number;
}

export type ClientMessage = Hello | RtcOffer | RtcCandidate | RtcState | Act | Ping | Ack | Kf | Media | Prompt | Reset | Pause | Resume | Step | Shown | ClientBye;
export type ServerMessage = Welcome | Queue | Loading | State | World | RtcAnswer | RtcOrigin | Pong | Chunk | Applied | Stats | Warn | Err | ServerBye;
