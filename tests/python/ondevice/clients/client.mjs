// A client's round, as client.c says it, in a tab: beside this module lie gradd.js, the files and
// the data; the update is posted.
import {Tensor, TrainingSession} from "./gradd.js";

const IN = 4;

async function read(name, Kind) {
  return new Kind(await (await fetch(name)).arrayBuffer());
}

export async function round(rate) {
  const session = await TrainingSession.create({
    checkpointState: "nominal_checkpoint",
    trainModel: "training_model.onnx",
    optimizerModel: "optimizer_model.onnx",
  });
  await session.loadParametersBuffer(await read("global.f32", Float32Array), false);
  const before = (await session.getContiguousParameters(true)).data.slice();
  await session.setLearningRate(rate);
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
  await session.release();
  const update = after.map((value, i) => value - before[i]);
  await fetch("update.f32", {method: "POST", body: update});
  return [rows, loss / rows];
}
