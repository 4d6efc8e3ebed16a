/* What the module for browsers refuses, releases and keeps: in node, on digits' artifacts.
 * web_errors.mjs BUILD FOLDER; prints JSON. Started with --expose-gc. */
import fs from "node:fs/promises";

const [, , build, folder] = process.argv;
const {Tensor, TrainingSession} = await import(`${build}/gradd.js`);
const {openStore} = await import(`${build}/store.js`);
const at = `${build}/digits/`;
const files = {
  checkpointState: `${at}checkpoint`, trainModel: `${at}training_model.onnx`,
  evalModel: `${at}eval_model.onnx`, optimizerModel: `${at}optimizer_model.onnx`,
};
const open = (more = {}, options = {}) => TrainingSession.create({...files, ...more}, options);
const batch = (rows, digit = 3) => ({
  x: new Tensor("float32", new Float32Array(rows * 784).fill(0.5), [rows, 1, 28, 28]),
  labels: new Tensor("int64", Array(rows).fill(digit)),
});

async function refused(does) {
  try {
    await does();
    return "nothing";
  } catch (error) {
    return `${error.name} ${error.code}: ${error.message}`;
  }
}

const session = await open();
const {x, labels} = batch(4);
const floats = new Tensor("float32", [1, 2, 3, 4]);
const said = {};
for (const [name, does] of Object.entries({
  missing: () => session.runTrainStep({x}),
  unknown: () => session.runTrainStep({x, labels, y: x}),
  output: () => session.runTrainStep({x, labels}, ["logits"]),
  dtype: () => session.runTrainStep({x, labels: floats}),
  shape: () => session.runTrainStep({x: floats, labels}),
  label: () => session.runTrainStep(batch(4, 10)),
  kind: () => new Tensor("string", ["a"]),
  count: () => new Tensor("float32", [1, 2, 3], [2, 2]),
  elements: () => new Tensor("int64", new Float32Array(2)),
  rank: () => session.runTrainStep({x: new Tensor("float32", [1], Array(9).fill(1)), labels}),
  pattern: () => session.freeze("none*"),
  frozen: () => session.freeze("*"),
  rate: () => session.setLearningRate(-1),
  buffer: () => session.loadParametersBuffer(new Uint8Array(6)),
  parameters: () => session.loadParametersBuffer(new Uint8Array(8)),
  names: () => session.exportModel(["x", "nothing"]),
  checkpoint: () => open({checkpointState: new Uint8Array(100)}),
  model: () => open({trainModel: new Uint8Array([1, 2, 3])}),
  none: () => open({trainModel: undefined}),
  path: () => open({trainModel: `${at}nothing.onnx`}),
  budget: () => open({}, {memoryBudget: 1}).then((small) => small.runTrainStep({x, labels})),
})) said[name] = await refused(does);

// Failures have changed nothing: a session that had none has the same loss.
const other = await open();
const losses = [];
for (const one of [session, other]) {
  await one.runOptimizerStep();
  losses.push((await one.runTrainStep({x, labels}))[session.trainingOutputNames[0]].data[0]);
}

// Parameters go out and in again; a checkpoint goes on with the same bits.
await session.runOptimizerStep();
const values = await session.getContiguousParameters();
await other.loadParametersBuffer(values.data);
const again = await open({checkpointState: await session.saveCheckpoint()});
for (const one of [session, other, again]) await one.lazyResetGrad();
const copies = [session, other, again].map(async (one) =>
  (await one.runTrainStep({x, labels}))[session.trainingOutputNames[0]].data[0]);
const same = await Promise.all(copies);
const steps = await again.getOptimizerSteps();
const frozen = [await again.freeze("body.*"), await again.getParameterNames(),
  await again.getParametersSize(), await again.getParametersSize(false), await again.thaw("*")];
await again.setLinearSchedule(0, 10, 0.5);
await again.scheduleStep();
const rate = await again.getLearningRate();

// Memory does not grow with steps, whatever their shapes, nor with sessions.
const held = [];
for (let i = 0; i < 120; i += 1) {
  await session.lazyResetGrad();
  await session.runTrainStep(batch(1 + (i % 12)));
  await session.runOptimizerStep();
  await session.saveCheckpoint();
  await session.exportModel(["scores"]);
  if (i % 60 === 59) held.push((await session.getMemory()).module);
}
for (const one of [session, other, again]) await one.release();
const released = await refused(() => session.runOptimizerStep());
const rest = () => { globalThis.gc(); return process.memoryUsage().rss; };
const wasm = await WebAssembly.compile(await fs.readFile(`${build}/gradd.wasm`));
const resident = [];
for (let i = 0; i < 60; i += 1) {
  const one = await open({}, {wasm});
  await one.runTrainStep({x, labels});
  await one.release();
  await new Promise((done) => { setTimeout(done, 0); });
  rest();
  if (i % 30 === 29) resident.push(rest());
}

const store = await openStore(folder);
await store.write("a", new Uint8Array([1, 2]));
const kept = [store.kind, await store.read("b"), [...await store.read("a")],
  (await fs.readdir(folder)).join()];
console.log(JSON.stringify({said, losses, same, steps, frozen, rate, held, released, resident, kept}));
