// A client's round, as client.c says it: node client.mjs GRADD FILES DATA RATE, by what a tab runs.
import {readFile, writeFile} from "node:fs/promises";
import {pathToFileURL} from "node:url";

const [module, files, data, rate] = process.argv.slice(2);
const {Tensor, TrainingSession} = await import(pathToFileURL(module));
const IN = 4;

async function read(name, Kind) {
  const bytes = new Uint8Array(await readFile(`${data}/${name}`)); // aligned, by a copy
  return new Kind(bytes.buffer);
}

const session = await TrainingSession.create({
  checkpointState: `${files}/nominal_checkpoint`,
  trainModel: `${files}/training_model.onnx`,
  optimizerModel: `${files}/optimizer_model.onnx`,
});
await session.loadParametersBuffer(await read("global.f32", Float32Array), false);
const before = (await session.getContiguousParameters(true)).data.slice();
await session.setLearningRate(Number(rate));
let [loss, rows] = [0, 0];
for (const k of [0, 1]) {
  const [x, labels] = [await read(`x${k}.f32`, Float32Array),
    await read(`y${k}.i64`, BigInt64Array)];
  const n = labels.length;
  const outputs = await session.runTrainStep({
    x: new Tensor("float32", x, [n, IN]), labels: new Tensor("int64", labels, [n])});
  loss += n * outputs[session.trainingOutputNames[0]].data[0];
  rows += n;
  await session.runOptimizerStep();
  await session.lazyResetGrad();
}
const after = (await session.getContiguousParameters(true)).data;
await writeFile(`${data}/update.f32`, after.map((value, i) => value - before[i]));
await session.release();
console.log(rows, loss / rows);
