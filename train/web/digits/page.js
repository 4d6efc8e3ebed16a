/* The page: draws, trains, shows, and keeps what was learnt. */
import {openStore} from "../store.js";
import {Tensor, TrainingSession} from "../gradd.js";
import {SIDE, centred, madeUp, paint, retried} from "./digits.js";

const CLASSES = 10;
const BATCH = 32;
const TESTED = 200; // made-up drawings that are never trained on
const KEEP_MS = 2000; // what was learnt is kept so often
const MOST_POINTS = 300; // of the curve: then two become one
// Places in the drawing of the curve, and the loss at its top and bottom: each line is a tenth.
const CURVE = {left: 40, right: 396, top: 8, bottom: 168, most: 4, least: 0.002};
const MARKS = [1, 0.1, 0.01];

const $ = (id) => document.getElementById(id);
const pen = $("paper").getContext("2d");

let session;
let store;
let running = false;
let strokes = []; // of the drawing at hand, in a square of side 1
let kept = {mine: [], points: [], each: 1, sum: 0, running: false};

function make(tag, text, className = "") {
  const element = document.createElementNS($("paper").namespaceURI, tag);
  element.textContent = text;
  element.className = className;
  return element;
}

function tell(text, isBad = false) {
  $("news").textContent = text;
  $("news").className = isBad ? "bad" : "";
}

// What a listener does, with its failure shown.
const shown = (does) => async (...words) => {
  try {
    await does(...words);
  } catch (error) {
    tell(error.message, true);
  }
};

// ---- the network

const pictures = (drawings) => {
  const pixels = new Float32Array(drawings.length * SIDE * SIDE);
  drawings.forEach((drawing, i) => paint(drawing, pixels, i * SIDE * SIDE, 2 + Math.random()));
  return new Tensor("float32", pixels, [drawings.length, 1, SIDE, SIDE]);
};
const answers = (digits) => new Tensor("int64", digits, [digits.length]);

// Of each drawing, how sure the network is of each digit.
async function read(x) {
  const labels = answers(Array(x.dims[0]).fill(0));
  const {scores} = await session.runEvalStep({x, labels}, ["scores"]);
  return Array.from({length: x.dims[0]}, (_, i) => {
    const row = [...scores.data.subarray(i * CLASSES, (i + 1) * CLASSES)];
    const high = Math.max(...row);
    const parts = row.map((score) => Math.exp(score - high));
    const sum = parts.reduce((a, b) => a + b);
    return parts.map((part) => part / sum);
  });
}

const best = (sure) => sure.indexOf(Math.max(...sure));

// Made-up drawings, and for half of the batch others like the visitor's, if there are any.
function batch() {
  const drawn = Array.from({length: BATCH}, (_, i) => {
    const {mine} = kept;
    if (mine.length && i % 2) {
      const {label, strokes: lines} = mine[Math.floor(Math.random() * mine.length)];
      return [label, retried(lines, Math.random, 0.01)];
    }
    const digit = Math.floor(Math.random() * CLASSES);
    return [digit, madeUp(digit, Math.random)];
  });
  return {x: pictures(drawn.map(([, lines]) => lines)), labels: answers(drawn.map(([d]) => d))};
}

let test;
async function examine() {
  if (!test) {
    const digits = Array.from({length: TESTED}, (_, i) => i % CLASSES);
    test = {digits, x: pictures(digits.map((digit) => madeUp(digit, Math.random)))};
  }
  const right = (await read(test.x)).filter((sure, i) => best(sure) === test.digits[i]).length;
  $("right").textContent = `${Math.round((100 * right) / TESTED)} %`;
  await judge();
}

// ---- training

function learnt(loss) {
  kept.sum += loss;
  kept.count = (kept.count ?? 0) + 1;
  if (kept.count < kept.each) return;
  kept.points.push(kept.sum / kept.count);
  [kept.sum, kept.count] = [0, 0];
  if (kept.points.length < MOST_POINTS) return;
  kept.points = kept.points.filter((_, i) => i % 2).map((b, i) => (kept.points[2 * i] + b) / 2);
  kept.each *= 2;
}

async function train() {
  let keepAt = 0; // at once: a reload goes on training
  let shownAt = 0;
  let pace = 0;
  const output = session.trainingOutputNames[0];
  while (running) {
    const feeds = batch();
    const start = performance.now();
    await session.lazyResetGrad();
    const {[output]: loss} = await session.runTrainStep(feeds, [output]);
    await session.runOptimizerStep();
    const now = performance.now();
    pace = pace ? 0.95 * pace + 0.05 * (now - start) : now - start;
    learnt(loss.data[0]);
    if (now - shownAt > 150) {
      shownAt = now;
      $("pace").textContent = `${pace.toFixed(1)} ms`;
      await showSteps();
      await showReading();
    }
    if (now > keepAt) {
      await keep();
      await examine();
      keepAt = performance.now() + KEEP_MS;
    }
  }
  await keep();
  await showSteps();
  await examine();
}

let training = Promise.resolve();
function setRunning(on) {
  running = kept.running = on;
  $("go").textContent = on ? "Pause" : "Train";
  const end = () => { if (running) setRunning(false); }; // it has failed
  if (on) training = training.then(shown(train)).then(end);
  return training;
}

// ---- what is kept

let keeping = Promise.resolve(); // one after the other
function keep() {
  keeping = keeping.catch(() => {}).then(async () => {
    await store.write("checkpoint", await session.saveCheckpoint());
    await store.write("page", new TextEncoder().encode(JSON.stringify(kept)));
  });
  return keeping;
}

function download(name, bytes) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([bytes]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// ---- what is shown

const line = (name, attributes, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
  if (text !== undefined) element.textContent = text;
  return element;
};

async function showSteps() {
  const steps = await session.getOptimizerSteps();
  const {points} = kept;
  let mean = points[0];
  const means = points.map((value) => (mean = 0.8 * mean + 0.2 * value));
  $("n-steps").textContent = steps.toLocaleString("en");
  if (points.length) $("loss").textContent = mean.toPrecision(3);
  const x = (i) => CURVE.left + (i / Math.max(points.length - 1, 1)) * (CURVE.right - CURVE.left);
  const part = (value) => Math.log(value / CURVE.least) / Math.log(CURVE.most / CURVE.least);
  const y = (value) => CURVE.bottom -
    Math.min(Math.max(part(value), 0), 1) * (CURVE.bottom - CURVE.top);
  const path = (values) => values.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
  $("steps").setAttribute("points", path(points));
  $("smooth").setAttribute("points", path(means));
  const marks = MARKS.map((value) => [
    line("line", {x1: CURVE.left, x2: CURVE.right, y1: y(value), y2: y(value)}),
    line("text", {x: CURVE.left - 8, y: y(value) + 4, "text-anchor": "end"}, value)]);
  $("grid").replaceChildren(...marks.flat(),
    line("text", {x: CURVE.left, y: 186}, "loss"),
    line("text", {x: CURVE.right, y: 186, "text-anchor": "end"}, `step ${steps}`));
}

function showScores(sure) {
  const first = sure ? best(sure) : -1;
  [...$("scores").children].forEach((row, digit) => {
    row.className = digit === first ? "best" : "";
    row.querySelector("b").style.width = sure ? `${100 * sure[digit]}%` : 0;
  });
}

async function showReading() {
  $("clear").disabled = !strokes.length;
  [...$("labels").children].forEach((button) => { button.disabled = !strokes.length || !session; });
  if (!strokes.length || !session) return showScores(null);
  const [sure] = await read(pictures([strokes]));
  if (!strokes.length) return showScores(null); // cleared meanwhile
  const digit = best(sure);
  const said = sure[digit] > 0.6 ? `It reads a ${digit}.` : `It is not sure: ${digit}?`;
  $("question").textContent = `${said} What is it?`;
  return showScores(sure);
}

function thumbnail(lines) {
  const canvas = make("canvas");
  [canvas.width, canvas.height] = [SIDE, SIDE];
  const pixels = new Float32Array(SIDE * SIDE);
  paint(lines, pixels, 0);
  const [red, green, blue] = getComputedStyle(document.body).color.match(/\d+/g).map(Number);
  const image = new ImageData(SIDE, SIDE);
  pixels.forEach((ink, i) => image.data.set([red, green, blue, 255 * ink], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function showMine() {
  $("hint").hidden = kept.mine.length > 0;
  $("drawings").replaceChildren(...kept.mine.map((one) => {
    const item = make("li");
    const button = make("button");
    button.title = "Remove this drawing";
    button.append(thumbnail(one.strokes), make("span", one.label));
    button.onclick = shown(async () => {
      kept.mine.splice(kept.mine.indexOf(one), 1);
      showMine();
      await judge();
      await keep();
    });
    item.append(button);
    return item;
  }));
}

// Whether the network reads the visitor's drawings as they were meant.
async function judge() {
  const {mine} = kept;
  if (!mine.length) return;
  const readings = await read(pictures(mine.map((one) => one.strokes)));
  if (mine.length !== readings.length) return;
  [...$("drawings").querySelectorAll("span")].forEach((mark, i) => {
    const [label, found] = [mine[i].label, best(readings[i])];
    mark.className = found === label ? "good" : "bad";
    mark.textContent = found === label ? `${label} ✓` : `${label}, not ${found}`;
  });
}

// ---- drawing

function showPaper() {
  const {width, height} = $("paper");
  pen.clearRect(0, 0, width, height);
  pen.strokeStyle = pen.fillStyle = getComputedStyle(document.body).color;
  pen.lineWidth = width / 14;
  pen.lineCap = pen.lineJoin = "round";
  strokes.forEach((stroke) => {
    pen.beginPath();
    stroke.forEach(([x, y]) => pen.lineTo(x * width, y * height));
    if (stroke.length === 1) pen.lineTo(stroke[0][0] * width, stroke[0][1] * height);
    pen.stroke();
  });
}

function place(event) {
  const box = $("paper").getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
}

function draw(event) {
  if (event.type === "pointerdown") {
    $("paper").setPointerCapture(event.pointerId);
    strokes.push([place(event)]);
  } else if (event.buttons && strokes.length) {
    const finer = event.getCoalescedEvents?.() ?? []; // more than one of a frame
    strokes.at(-1).push(...(finer.length ? finer : [event]).map(place));
  } else return;
  event.preventDefault();
  showPaper();
}

const clear = shown(async () => {
  strokes = [];
  showPaper();
  $("question").textContent = "Draw, and see what it reads.";
  await showReading();
});

const label = shown(async (digit) => {
  if (!strokes.length) return;
  const round = (value) => Math.round(1e3 * value) / 1e3;
  const rounded = centred(strokes).map((stroke) => stroke.map((point) => point.map(round)));
  kept.mine.push({label: digit, strokes: rounded});
  showMine();
  await clear();
  await judge();
  await keep();
});

// ---- beginning

async function open() {
  const files = {trainModel: "training_model.onnx", evalModel: "eval_model.onnx",
    optimizerModel: "optimizer_model.onnx"};
  const checkpointState = await store.read("checkpoint");
  if (checkpointState) {
    try {
      return [await TrainingSession.create({...files, checkpointState}), true];
    } catch (error) {
      tell(`What was kept cannot be used. The network starts again: ${error.message}`, true);
    }
  }
  return [await TrainingSession.create({...files, checkpointState: "checkpoint"}), false];
}

async function begin() {
  store = await openStore("gradd-digits");
  const page = await store.read("page");
  let goesOn;
  [session, goesOn] = await open();
  if (page) {
    const {mine, ...rest} = JSON.parse(new TextDecoder().decode(page));
    kept = goesOn ? {mine, ...rest} : {...kept, mine};
  }
  await session.setLearningRate(0.002);
  const trained = await session.getParameterNames();
  $("head").checked = !trained.some((name) => name.startsWith("body."));
  ["go", "head", "model", "checkpoint", "again"].forEach((id) => { $(id).disabled = false; });
  const where = {"private files": "in the private files of this page, in this browser",
    database: "in this browser's database", memory: "nowhere beyond this visit"}[store.kind];
  const why = store.why && ` (${store.why})`;
  $("kept").textContent = `What is learnt and drawn is kept ${where}${why}.`;
  showMine();
  await showSteps();
  await showReading();
  await examine();
  const ready = "Ready: it has learnt nothing yet.";
  if ($("news").className !== "bad") tell(goesOn ? "It goes on where it was." : ready);
  if (kept.running) setRunning(true);
}

function listen() {
  for (let digit = 0; digit < CLASSES; digit += 1) {
    const row = make("li", digit);
    row.append(make("i"));
    row.firstElementChild.append(make("b"));
    $("scores").append(row);
    const button = make("button", digit);
    button.onclick = () => label(digit);
    button.disabled = true;
    $("labels").append(button);
  }
  ["pointerdown", "pointermove"].forEach((name) => $("paper").addEventListener(name, draw));
  $("paper").addEventListener("pointerup", shown(showReading));
  $("clear").onclick = clear;
  $("go").onclick = shown(async () => {
    const starts = !running;
    if (starts) tell("It trains.");
    await setRunning(starts);
    if ($("news").className !== "bad") tell("Paused.");
  });
  $("head").onchange = shown(async () => {
    await (($("head").checked) ? session.freeze("body.*") : session.thaw("body.*"));
    await keep();
  });
  $("model").onclick = shown(async () => {
    download("digits.onnx", await session.exportModel(["scores"]));
  });
  $("checkpoint").onclick = shown(async () => {
    download("digits.ckpt", await session.saveCheckpoint());
  });
  $("again").onclick = shown(async () => {
    await setRunning(false);
    await keeping;
    await store.write("checkpoint", new Uint8Array());
    kept = {mine: kept.mine, points: [], each: 1, sum: 0, running: false};
    await store.write("page", new TextEncoder().encode(JSON.stringify(kept)));
    location.reload();
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^\d$/.test(event.key)) label(Number(event.key));
    if (event.key === "Escape") clear();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && session) shown(keep)();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    showPaper();
    showMine();
    if (session) shown(judge)();
  });
}

listen();
shown(begin)();
