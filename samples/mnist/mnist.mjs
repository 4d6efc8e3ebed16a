// Trains MNIST in node: node mnist.mjs DATA FILES [EPOCHS]. In a page it is the same, with pictures
// that the page has.
import {readFile, writeFile} from "node:fs/promises";
import {join} from "node:path";
import {Tensor, TrainingSession} from "../../build/web/gradd.js";

const [PIXELS, CLASSES, ROWS] = [784, 10, 64];
const [data, files, epochs = "1"] = process.argv.slice(2);

async function read(kind) {
  const pixels = (await readFile(join(data, `${kind}-images-idx3-ubyte`))).subarray(16);
  const labels = (await readFile(join(data, `${kind}-labels-idx1-ubyte`))).subarray(8);
  return {
    pictures: Float32Array.from(pixels, (value) => value / 255),
    labels: BigInt64Array.from(labels, BigInt),
  };
}

function batch({pictures, labels}, at, rows) {
  const end = Math.min(at + rows, labels.length);
  return {
    x: new Tensor("float32", pictures.slice(at * PIXELS, end * PIXELS), [end - at, PIXELS]),
    labels: new Tensor("int64", labels.slice(at, end), [end - at]),
  };
}

const session = await TrainingSession.create({
  checkpointState: join(files, "checkpoint"),
  trainModel: join(files, "training_model.onnx"),
  evalModel: join(files, "eval_model.onnx"),
  optimizerModel: join(files, "optimizer_model.onnx"),
});
const [digits, others] = [await read("train"), await read("t10k")];
for (let epoch = 1; epoch <= Number(epochs); epoch += 1) {
  let [sum, steps, right] = [0, 0, 0];
  for (let at = 0; at < digits.labels.length; at += ROWS, steps += 1) {
    const outputs = await session.runTrainStep(batch(digits, at, ROWS));
    sum += outputs[session.trainingOutputNames[0]].data[0];
    await session.runOptimizerStep();
    await session.lazyResetGrad();
  }
  const {scores} = await session.runEvalStep(batch(others, 0, others.labels.length));
  others.labels.forEach((label, i) => {
    const row = scores.data.subarray(i * CLASSES, (i + 1) * CLASSES);
    right += row.indexOf(Math.max(...row)) === Number(label) ? 1 : 0;
  });
  const n = others.labels.length;
  console.log(`epoch ${epoch}: loss ${(sum / steps).toFixed(4)}, ${right} of ${n} right`);
}
await writeFile(join(files, "mnist.onnx"), await session.exportModel(["scores"]));
await session.release();
