/* A training for tests, the same in node and in a page: losses of `steps` steps on one batch, which
 * lies beside the artifacts. In node: web_training.mjs MODULE FOLDER STEPS DIMS, printed as JSON. */

export async function train({Tensor, TrainingSession}, folder, steps, dims) {
  const read = async (name) => {
    if (typeof process !== "object") return (await fetch(folder + name)).arrayBuffer();
    const bytes = await (await import("node:fs/promises")).readFile(folder + name);
    return new Uint8Array(bytes).buffer;
  };
  const session = await TrainingSession.create({
    checkpointState: `${folder}checkpoint`, trainModel: `${folder}training_model.onnx`,
    evalModel: `${folder}eval_model.onnx`, optimizerModel: `${folder}optimizer_model.onnx`,
  });
  const feeds = {
    x: new Tensor("float32", new Float32Array(await read("x.bin")), dims),
    labels: new Tensor("int64", new BigInt64Array(await read("labels.bin")), [dims[0]]),
  };
  const [name] = session.trainingOutputNames;
  const losses = [];
  const times = [];
  for (let step = 0; step < steps; step += 1) {
    const start = performance.now();
    await session.lazyResetGrad();
    losses.push((await session.runTrainStep(feeds, [name]))[name].data[0]);
    await session.runOptimizerStep();
    times.push(performance.now() - start);
  }
  losses.push((await session.runEvalStep(feeds))[session.evalOutputNames[0]].data[0]);
  await session.release();
  return {losses, ms: times.sort((a, b) => a - b)[steps >> 1]};
}

if (typeof process === "object") {
  const [, , module, folder, steps, dims] = process.argv;
  const {losses, ms} = await train(await import(module), folder, Number(steps), JSON.parse(dims));
  console.log(JSON.stringify({losses, ms}));
}
