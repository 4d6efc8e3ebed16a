/* Trains an ONNX model where this module runs: in a tab of a browser, or in node. It loads
 * gradd.wasm, which lies beside it, and nothing else. The names are those of onnxruntime-web:
 *
 *     const session = await TrainingSession.create(
 *         {checkpointState, trainModel, evalModel, optimizerModel});
 *     await session.lazyResetGrad();
 *     const {loss} = await session.runTrainStep({x: new Tensor("float32", x, [32, 784]), labels});
 *     await session.runOptimizerStep();
 *
 * In a page a worker, which is this module again, does the work, and the page answers meanwhile. */

const NODE = typeof process === "object" && Boolean(process.versions?.node);
const WORKER = "gradd training"; // the name of a worker that serves a session
const TYPES = { // the number in ONNX, and what holds the elements
  float32: [1, Float32Array], uint8: [2, Uint8Array], int8: [3, Int8Array],
  uint16: [4, Uint16Array], int16: [5, Int16Array], int32: [6, Int32Array],
  int64: [7, BigInt64Array], bool: [9, Uint8Array], float16: [10, Uint16Array],
  float64: [11, Float64Array], uint32: [12, Uint32Array], uint64: [13, BigUint64Array],
};
const MEMORY = ["parameters", "gradients", "moments", "arena", "constants", "buffers", "plans"];

/** `code` is a status of the library (TENSOR, MODEL, ...), `message` its sentence. */
export class TrainError extends Error {
  constructor(code, message) {
    super(message);
    Object.assign(this, {name: "TrainError", code});
  }
}

/** Elements in row-major order. An array of numbers becomes a typed one. */
export class Tensor {
  constructor(type, data, dims = [data.length]) {
    if (!TYPES[type]) throw new TrainError("UNSUPPORTED", `no element type is named '${type}'`);
    const Elements = TYPES[type][1];
    if (Array.isArray(data)) data = Elements.from(data, Elements.name[0] === "B" ? BigInt : Number);
    const count = dims.reduce((a, b) => a * b, 1);
    if (!(data instanceof Elements) || data.length !== count) {
      const [want, got] = [Elements.name, data?.constructor.name];
      const text = `[${dims}]: expected ${count} in ${want}, got ${data?.length} in ${got}`;
      throw new TrainError("TENSOR", text);
    }
    Object.assign(this, {type, data, dims: [...dims]});
  }
}

// An instance of the module of WebAssembly: its memory, texts and failures.
class Instance {
  constructor(module) {
    const clock = (...words) => { // which, precision, where the nanoseconds go
      const now = BigInt(Math.round(performance.now() * 1e6));
      new DataView(this.c.memory.buffer).setBigUint64(words.at(-1), now, true);
      return 0;
    };
    this.c = new WebAssembly.Instance(module, {
      wasi_snapshot_preview1: {clock_time_get: clock},
      env: {emscripten_notify_memory_growth: () => {}},
    }).exports;
    this.c._initialize();
  }

  // Memory moves when it grows: a view does not outlive a call.
  view(at, Elements, count) { return new Elements(this.c.memory.buffer, at, count); }

  text(at) {
    const bytes = new Uint8Array(this.c.memory.buffer);
    return new TextDecoder().decode(bytes.subarray(at, bytes.indexOf(0, at)));
  }

  check(status) {
    if (status) throw new TrainError(
      this.text(this.c.web_status_name(status)), this.text(this.c.web_error()));
  }

  put({buffer, byteOffset, byteLength}) {
    const at = this.c.web_take(byteLength);
    if (!at) throw new TrainError("NOMEM", `no memory for ${byteLength} bytes`);
    this.view(at, Uint8Array, byteLength).set(new Uint8Array(buffer, byteOffset, byteLength));
    return at;
  }

  with(elements, use) {
    const isText = typeof elements === "string";
    const at = this.put(isText ? new TextEncoder().encode(`${elements}\0`) : elements);
    try {
      return use(at);
    } finally {
      this.c.web_give_back(at);
    }
  }

  // What a function of C writes into an array, a copy.
  filled(array, use) {
    return this.with(array, (at) => {
      this.check(use(at));
      return this.view(at, array.constructor, array.length).slice();
    });
  }

  list(name, i = 0) { return name(i) ? [this.text(name(i)), ...this.list(name, i + 1)] : []; }

  written(status) {
    this.check(status);
    const [data, bytes] = this.view(this.c.web_written(), Uint32Array, 2);
    const copy = this.view(data, Uint8Array, bytes).slice();
    this.c.web_forget();
    return copy;
  }

  input(i, {type, data, dims}) {
    const [where] = this.with(Int32Array.from([...dims, 0]), (shape) => this.filled(
      new Uint32Array(1), (at) => this.c.web_input(i, TYPES[type][0], dims.length, shape, at)));
    this.view(where, data.constructor, data.length).set(data);
  }

  output(i) {
    const [code, rank, bytes, at, ...dims] = this.view(this.c.web_output(i), Int32Array, 12);
    const [type, [, Elements]] = Object.entries(TYPES).find(([, [number]]) => number === code);
    const data = new Elements(this.c.memory.buffer.slice(at, at + bytes));
    return {type, data, dims: dims.slice(0, rank)};
  }

  step(phase, feeds, fetches = this.names[phase].outputs) {
    const {inputs, outputs} = this.names[phase];
    const wanted = Array.isArray(fetches) ? fetches : Object.keys(fetches);
    for (const [given, all] of [[Object.keys(feeds), inputs], [wanted, outputs]]) {
      const wrong = given.find((name) => !all.includes(name));
      if (wrong) throw new TrainError("TENSOR", `no name '${wrong}': expected ${all.join(", ")}`);
    }
    inputs.forEach((name, i) => {
      if (!feeds[name]) throw new TrainError("TENSOR", `input '${name}' is missing`);
      this.input(i, new Tensor(feeds[name].type, feeds[name].data, feeds[name].dims));
    });
    this.check(this.c.web_step(phase));
    return Object.fromEntries(wanted.map((name) => [name, this.output(outputs.indexOf(name))]));
  }
}

// One session (entry.c). Its methods are those of a TrainingSession, which gives promises.
class Engine extends Instance {
  constructor(module, parts, {memoryBudget = 0, seed = 0}) {
    super(module);
    const at = parts.map((part) => (part ? this.put(part) : 0));
    const table = Uint32Array.from(parts.flatMap((part, i) => [at[i], part ? part.length : 0]));
    this.with(table, (where) => this.check(this.c.web_open(where, memoryBudget, seed)));
    at.forEach((part) => this.c.web_give_back(part));
    const of = (phase, isOutput) => this.list((i) => this.c.web_name(phase, isOutput, i));
    this.names = [0, 1].map((phase) => ({inputs: of(phase, 0), outputs: of(phase, 1)}));
  }

  /** Forward and backward: gradients are added to those since the last reset. Feeds: a tensor for
   * each input; fetches: names of outputs, all if left out. */
  runTrainStep(feeds, fetches) { return this.step(0, feeds, fetches); }
  /** A forward of the eval model, which changes nothing. */
  runEvalStep(feeds, fetches) { return this.step(1, feeds, fetches); }
  lazyResetGrad() { this.c.web_lazy_reset_grad(); }
  runOptimizerStep() { this.check(this.c.web_optimizer_step()); }

  /** Elements of the parameters together; their values one after the other; the bytes of such. */
  getParametersSize(trainableOnly = true) {
    const count = (at) => this.c.web_parameters_size(trainableOnly, at);
    return this.filled(new Float64Array(1), count)[0];
  }
  getContiguousParameters(trainableOnly = true) {
    const count = this.getParametersSize(trainableOnly);
    const copy = (at) => this.c.web_copy_out(trainableOnly, at, count);
    return {type: "float32", data: this.filled(new Float32Array(count), copy), dims: [count]};
  }
  loadParametersBuffer(bytes, trainableOnly = true) {
    const copy = (at) => this.c.web_copy_in(trainableOnly, at, bytes.byteLength);
    this.with(bytes, (at) => this.check(copy(at)));
  }

  // ---- what onnxruntime-web did not have
  getLearningRate() { return this.c.web_learning_rate(); }
  setLearningRate(rate) { this.check(this.c.web_set_learning_rate(rate)); }
  /** From `initial` to 0 at `total` steps, after `warmup` steps; scheduleStep sets the rate. */
  setLinearSchedule(warmup, total, initial) {
    this.check(this.c.web_set_linear_schedule(warmup, total, initial));
  }
  scheduleStep() { this.check(this.c.web_schedule_step()); }
  getOptimizerSteps() { return this.c.web_optimizer_steps(); }
  getParameterNames(trainableOnly = true) {
    return this.list((i) => this.c.web_parameter_name(trainableOnly, i));
  }
  /** Parameters that match ("body.*") are no longer trained, or are again: how many changed. */
  freeze(pattern, trained = false) {
    return this.with(pattern, (text) => this.filled(new Int32Array(1),
      (at) => this.c.web_choose(trained, text, at)))[0];
  }
  thaw(pattern) { return this.freeze(pattern, true); }
  /** The bytes of a checkpoint, and of an ONNX model that has the parameters inside. */
  saveCheckpoint(withOptimizer = true) { return this.written(this.c.web_save(withOptimizer)); }
  exportModel(outputNames) {
    return this.with(outputNames.join("\0"),
      (at) => this.written(this.c.web_export(at, outputNames.length)));
  }
  /** Bytes held, by kind; plans: how many; module: all memory of the instance. */
  getMemory() {
    const held = this.filled(new Float64Array(MEMORY.length), (at) => this.c.web_memory(at));
    return Object.fromEntries([["module", this.c.memory.buffer.byteLength],
      ...MEMORY.map((name, i) => [name, held[i]])]);
  }
}

// Both start what has an engine: a function (method, words) => promise, and one that ends it. The
// first method is "open". A trap leaves an instance in no known state: it was the last call then.
function startHere() {
  let engine, ended;
  const call = async (method, words) => {
    if (ended) throw ended;
    try {
      if (method !== "open") return engine[method](...words);
      engine = new Engine(...words);
      return engine.names;
    } catch (error) {
      if (error instanceof TrainError) throw error;
      throw ended = new TrainError("INTERNAL", `the session has ended: ${error.message}`);
    }
  };
  return [call, () => {}];
}

function startWorker() {
  const worker = new Worker(import.meta.url, {type: "module", name: WORKER});
  const waiting = new Map();
  let last = 0, ended;
  const end = (why) => {
    ended = new TrainError("STALE", why);
    worker.terminate();
    waiting.forEach(([, reject]) => reject(ended));
  };
  worker.onerror = (event) => end(`the worker has ended: ${event.message ?? "it did not load"}`);
  worker.onmessage = ({data: [id, error, result]}) => {
    const [resolve, reject] = waiting.get(id);
    waiting.delete(id);
    return error ? reject(new TrainError(...error)) : resolve(result);
  };
  const call = (method, words) => new Promise((resolve, reject) => {
    waiting.set((last += 1), [resolve, reject]);
    if (ended) reject(ended);
    else worker.postMessage([last, method, words]);
  });
  return [call, end];
}

if (typeof WorkerGlobalScope === "function" && globalThis.name === WORKER) {
  const [call] = startHere();
  globalThis.onmessage = ({data: [id, method, words]}) => call(method, words).then(
    (result) => postMessage([id, null, result]),
    ({code, message}) => postMessage([id, [code, message]]));
}

async function readBytes(source) {
  if (!source || ArrayBuffer.isView(source)) return source;
  if (NODE && !/^https?:/.test(source)) {
    const {readFile} = await import("node:fs/promises");
    return readFile(source).catch(({message}) => { throw new TrainError("IO", message); });
  }
  const reply = await fetch(source);
  if (!reply.ok) throw new TrainError("IO", `cannot load '${source}': status ${reply.status}`);
  return new Uint8Array(await reply.arrayBuffer());
}

/** One training. Its methods are those of Engine above, and return promises. */
export class TrainingSession {
  #call;
  #end;
  static {
    for (const name of Object.getOwnPropertyNames(Engine.prototype).slice(1)) {
      this.prototype[name] = function (...words) { return this.#call(name, words); };
    }
  }

  /** Files are addresses, paths (in node) or bytes; evalModel and optimizerModel may be left out.
   * Options: worker (in a page true), wasm (address, bytes or WebAssembly.Module), memoryBudget
   * (most bytes of activations in a step, 0 = what it takes), seed. */
  static async create(files, {worker = typeof document === "object", wasm, ...options} = {}) {
    const {checkpointState, trainModel, evalModel, optimizerModel} = files;
    wasm ??= new URL("gradd.wasm", import.meta.url);
    const module = wasm instanceof WebAssembly.Module ? wasm
      : await WebAssembly.compile(await readBytes(wasm));
    const parts = await Promise.all(
      [checkpointState, trainModel, evalModel, optimizerModel].map(readBytes));
    const session = new TrainingSession();
    [session.#call, session.#end] = worker ? startWorker() : startHere();
    const names = await session.#call("open", [module, parts, options]).catch((error) => {
      session.release();
      throw error;
    });
    [session.trainingInputNames, session.evalInputNames] = names.map((phase) => phase.inputs);
    [session.trainingOutputNames, session.evalOutputNames] = names.map((phase) => phase.outputs);
    return session;
  }

  /** Ends what runs, and gives the memory back. */
  async release() {
    this.#end("the session was released");
    this.#call = async () => { throw new TrainError("STALE", "the session was released"); };
  }
}
