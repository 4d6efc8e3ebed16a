"""The library in WebAssembly: in node, in a browser, and the page that learns digits in a tab."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from gradd.train import CheckpointState, Module, Optimizer, artifacts, onnxblock
from helpers import BUILD, ROOT
from helpers import device_models as models
from helpers.browser import BROWSER, Page, browse, serve
from helpers.waiting import until

B = os.path.relpath(BUILD, ROOT)  # as `make` has it: another spelling is another build
WEB = BUILD / "web"
HERE = Path(__file__).parent
STEPS = 50
# All that the module asks of what loads it: so "data stay in the tab" can be checked.
IMPORTS = {"wasi_snapshot_preview1.clock_time_get", "env.emscripten_notify_memory_growth"}
FILES = {
    *("digits/index.html", "digits/page.css", "digits/page.js", "digits/digits.js"),
    *("gradd.js", "gradd.wasm", "store.js"),
    *("digits/training_model.onnx", "digits/eval_model.onnx", "digits/optimizer_model.onnx"),
}
NEWS = "document.getElementById('news')"
# Strokes in a square of side 1.
ONE = [(0.45, 0.1), (0.45, 0.3), (0.46, 0.6), (0.45, 0.9)]
ZERO = [(0.5 + 0.28 * math.sin(a / 3.2), 0.5 - 0.38 * math.cos(a / 3.2)) for a in range(21)]


@pytest.fixture(scope="module")
def web() -> Path:
    """What `make web` builds."""
    for program in ("emcc", "node"):
        if not shutil.which(program):
            pytest.skip(f"no {program}")
    command = ["make", "--no-print-directory", f"B={B}", "web"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return WEB


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A tab of a browser that has kept nothing yet."""
    if not BROWSER:
        pytest.skip("no chromium")
    with browse(tmp_path) as tab:
        yield tab


def node(*words: object) -> dict:
    """What a script prints, as JSON."""
    command = ["node", "--expose-gc", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def make_training(folder: Path, web: Path, name: str) -> list[int]:
    """Artifacts of a model and a batch beside them; the batch's shape."""
    folder.mkdir()
    dims = [8, models.IN]
    if name == "digits":
        dims = [8, 1, 28, 28]
        for file in (web / "digits").glob("*_model.onnx"):
            shutil.copy(file, folder)
        shutil.copy(web / "digits/checkpoint", folder)
    else:
        sgd = onnxblock.optim.SGD(momentum=0.9) if name == "momentum" else None
        models.generate(folder, optimizer=sgd or artifacts.OptimType.AdamW)
    rng = np.random.default_rng(3)
    rng.random(dims, np.float32).tofile(folder / "x.bin")
    rng.integers(0, models.OUT, dims[0]).tofile(folder / "labels.bin")
    return dims


def native_losses(folder: Path, dims: list[int]) -> list[float]:
    """As web_training.mjs has them, by the library for this machine."""
    state, module = models.load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    x = np.fromfile(folder / "x.bin", np.float32).reshape(dims)
    labels = np.fromfile(folder / "labels.bin", np.int64)
    losses = []
    for _ in range(STEPS):
        module.lazy_reset_grad()
        losses.append(_loss(module(x, labels)))
        optimizer.step()
    module.eval()
    return [*losses, _loss(module(x, labels))]


def _loss(outputs: object) -> float:
    return float(outputs[0] if isinstance(outputs, list | tuple) else outputs)


def test_the_page_and_the_modules_name_no_other_host() -> None:
    """And the module that trains is small."""
    found = [p for p in (ROOT / "train/web").rglob("*") if p.suffix in {".js", ".css", ".html"}]
    assert len(found) == 6
    for path in found:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|\"//|@import|url\(", text), path
    assert len((ROOT / "train/web/gradd.js").read_text(encoding="utf-8").splitlines()) <= 300


@pytest.mark.nightly
def test_the_module_asks_for_a_clock_alone(web: Path) -> None:
    script = f"""const fs = require("fs");
    const module = new WebAssembly.Module(fs.readFileSync({json.dumps(str(web / "gradd.wasm"))}));
    const names = WebAssembly.Module.imports(module).map((i) => `${{i.module}}.${{i.name}}`);
    console.log(JSON.stringify({{names}}));"""
    assert set(node("-e", script)["names"]) == IMPORTS


@pytest.mark.nightly
def test_sizes(web: Path, tmp_path: Path) -> None:
    """With all operators, and with those of the digits alone."""
    assert len(gzip.compress((web / "gradd.wasm").read_bytes())) <= 450 * 1000
    training, evaluation = (web / f"digits/{kind}_model.onnx" for kind in ("training", "eval"))
    command = ["make", "--no-print-directory", f"B={B}", f"OPS={training},{evaluation}", "web"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert len(gzip.compress((web / "ops/gradd.wasm").read_bytes())) <= 180 * 1000
    dims = make_training(tmp_path / "digits", web, "digits")
    shutil.copy(web / "gradd.js", web / "ops")
    words = (tmp_path / "digits/", STEPS, json.dumps(dims))
    small, whole = (
        node(HERE / "web_training.mjs", at / "gradd.js", f"{words[0]}/", *words[1:])["losses"]
        for at in (web / "ops", web)
    )
    assert small == whole


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["digits", "adamw", "momentum"])
def test_node_and_a_browser_have_the_same_bits(
    web: Path, page: Page, tmp_path: Path, name: str
) -> None:
    """And those of this machine but for the last places: no fused multiply-add there."""
    root = tmp_path / "root"
    root.mkdir()
    dims = make_training(root / "training", web, name)
    for file in (web / "gradd.js", web / "gradd.wasm", HERE / "web_training.mjs"):
        shutil.copy(file, root)
    words = f"{root}/training/", STEPS, json.dumps(dims)
    in_node = node(root / "web_training.mjs", root / "gradd.js", *words)["losses"]
    (root / "index.html").write_text("<!doctype html><title>empty</title>")
    with serve(root) as url:
        page.open(url + "index.html")
        in_browser = page.run(f"""(async () => {{
            const {{train}} = await import("/web_training.mjs");
            return train(await import("/gradd.js"), "/training/", {STEPS}, {dims});
        }})()""")["losses"]
    assert in_node == in_browser and len(in_node) == STEPS + 1
    assert in_node[-1] < in_node[0]
    expected = native_losses(root / "training", dims)
    np.testing.assert_allclose(in_node, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.nightly
def test_errors_releases_and_files_in_node(web: Path, tmp_path: Path) -> None:
    """Failures have the library's sentence and change nothing; memory does not grow."""
    found = node(HERE / "web_errors.mjs", web, tmp_path / "kept")
    sentences = {
        "missing": "TENSOR: input 'labels' is missing",
        "unknown": "TENSOR: no name 'y': expected x, labels",
        "output": "TENSOR: no name 'logits': expected onnx::loss::1, scores",
        "dtype": "TENSOR: input 'labels': the graph declares element type i64, got f32[4]",
        "shape": "TENSOR: input 'x': the graph declares rank 4, got f32[4]",
        "label": "INDEX: node 8",
        "kind": "UNSUPPORTED: no element type is named 'string'",
        "count": "TENSOR: [2,2]: expected 4 in Float32Array, got 3 in Float32Array",
        "elements": "TENSOR: [2]: expected 2 in BigInt64Array, got 2 in Float32Array",
        "rank": "LIMIT: rank 9 is outside 0..8",
        "pattern": "TENSOR: no parameter of the model matches 'none*'",
        "frozen": "TENSOR: '*' would leave no parameter to train",
        "rate": "TENSOR: a learning rate of -1",
        "buffer": "TENSOR: 6 bytes are no f32 numbers",
        "parameters": "TENSOR: the parameters have 26698 elements, the buffer 2",
        "names": "TENSOR: export: the model has no output 'nothing'",
        "checkpoint": "MODEL: checkpoint: the file is not of kind ODTC",
        "model": "MODEL: the training model: this is not an ONNX model",
        "none": "TENSOR: no training model was given",
        "path": "IO: ENOENT",
        "budget": "NOMEM: no plan fits the memory budget of 1 bytes",
    }
    assert found["said"].keys() == sentences.keys()
    for name, sentence in sentences.items():
        assert found["said"][name].startswith(f"TrainError {sentence}"), found["said"][name]
    first, second = found["losses"]
    assert first == second
    assert len(set(found["same"])) == 1 and found["same"][0] < first
    assert found["steps"] == 2 and found["rate"] == pytest.approx(0.4)
    assert found["frozen"] == [6, ["head.weight", "head.bias"], 330, 26698, 6]
    assert found["released"] == "TrainError STALE: the session was released"
    half, end = found["held"]
    assert half == end
    half, end = found["resident"]
    assert end < half + 60 * 2**20  # 30 sessions take 480 MiB together
    assert found["kept"] == ["folder", None, [1, 2], "a"]


@pytest.mark.nightly
def test_the_code_of_the_page_in_the_documentation_runs(web: Path, tmp_path: Path) -> None:
    """Beside the digits' artifacts: losses that fall, a model, a checkpoint that is kept."""
    make_training(tmp_path / "run", web, "digits")
    for module in ("gradd.js", "gradd.wasm", "store.js"):
        shutil.copy(web / module, tmp_path / "run")
    text = (ROOT / "docs/browser.md").read_text(encoding="utf-8")
    training, kept, _ = re.findall(r"^```js\n(.*?)^```", text, re.M | re.S)
    # What is kept is saved before the session is released.
    lines = training.replace("await session.release();\n", kept + "await session.release();\n")
    lines += "console.log(model.length, bytes.length === (await store.read('checkpoint')).length);"
    (tmp_path / "run/page.mjs").write_text(lines)
    command = ["node", "page.mjs"]
    done = subprocess.run(command, cwd=tmp_path / "run", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *losses, last = done.stdout.splitlines()
    assert len(losses) == 20 and float(losses[-1]) < float(losses[0])
    assert re.fullmatch(r"\d{6} true", last), last


@pytest.mark.nightly
def test_a_tab_takes_part_in_a_federation(web: Path, page: Page, tmp_path: Path) -> None:
    """By the code of the documentation: its update, beside a native client's on the same data."""
    root = tmp_path / "root"
    dims = make_training(root, web, "digits")
    for module in ("gradd.js", "gradd.wasm"):
        shutil.copy(web / module, root)
    (root / "index.html").write_text("<!doctype html><title>a client</title>")
    state, module = models.load(root)
    before = module.get_contiguous_parameters(True).numpy().copy()
    before.tofile(root / "weights")
    text = (ROOT / "docs/browser.md").read_text(encoding="utf-8")
    code = re.findall(r"^```js\n(.*?)^```", text, re.M | re.S)[-1]
    posted: list[bytes] = []
    with serve(root, posted) as url:
        page.open(url + "index.html")
        page.run(f"""(async () => {{
            const {{Tensor, TrainingSession}} = await import("/gradd.js");
            const session = await TrainingSession.create({{checkpointState: "checkpoint",
                trainModel: "training_model.onnx", optimizerModel: "optimizer_model.onnx"}});
            const read = async (name) => (await fetch(name)).arrayBuffer();
            const x = new Tensor("float32", new Float32Array(await read("x.bin")), {dims});
            const labels = new Tensor("int64", new BigInt64Array(await read("labels.bin")));
            {code}
        }})()""")
    (update,) = posted
    of_tab = np.frombuffer(update, np.float32)
    optimizer = Optimizer(root / "optimizer_model.onnx", module)
    x = np.fromfile(root / "x.bin", np.float32).reshape(dims)
    labels = np.fromfile(root / "labels.bin", np.int64)
    for _ in range(5):
        module.lazy_reset_grad()
        module(x, labels)
        optimizer.step()
    native = module.get_contiguous_parameters(True).numpy() - before
    assert np.abs(native).max() > 1e-3
    np.testing.assert_allclose(of_tab, native, atol=2e-5)


@pytest.mark.nightly
def test_the_page_answers_while_a_worker_works(web: Path, page: Page) -> None:
    """Timers of the page run during a step; without a worker none does."""
    with serve(web) as url:
        page.open(url + "digits/page.css")
        script = """(async () => {
            const {Tensor, TrainingSession} = await import("/gradd.js");
            const at = "/digits/";
            const trainModel = at + "training_model.onnx";
            const files = {checkpointState: at + "checkpoint", trainModel};
            const counts = [];
            for (const options of [undefined, {worker: false}]) {
                const session = await TrainingSession.create(files, options);
                const x = new Tensor("float32", new Float32Array(1024 * 784), [1024, 1, 28, 28]);
                const labels = new Tensor("int64", Array(1024).fill(1));
                let count = 0;
                const tick = () => { count += 1; timer = setTimeout(tick, 0); };
                let timer = setTimeout(tick, 0);
                await session.runTrainStep({x, labels}, []);
                counts.push(count);
                clearTimeout(timer);
                await session.release();
            }
            return counts;
        })()"""
        in_worker, in_page = page.run(script)
    assert in_worker > 0 and in_page == 0


def _text(page: Page, name: str) -> str:
    return page.run(f"document.getElementById('{name}').textContent")


def _click(page: Page, selector: str) -> None:
    page.until(f"!document.querySelector('{selector}').disabled")
    page.run(f"document.querySelector('{selector}').click()")


def _steps(page: Page) -> int:
    return int(_text(page, "n-steps").replace(",", ""))


def _wait_for_steps(page: Page, steps: int) -> None:
    number = "Number(document.getElementById('n-steps').textContent.replaceAll(',', ''))"
    page.until(f"{number} >= {steps}")


def _draw(page: Page, points: list[tuple[float, float]]) -> None:
    left, top, size = page.run("""(() => {
        const paper = document.getElementById("paper");
        paper.scrollIntoView({block: "center"});
        const {left, top, width} = paper.getBoundingClientRect();
        return [left, top, width];
    })()""")
    page.drag([(left + size * x, top + size * y) for x, y in points])


def _download(page: Page, name: str, file: Path) -> bytes:
    _click(page, f"#{name}")
    until(file.exists, f"{name} is not downloaded")
    return file.read_bytes()


def _is_dark(page: Page) -> bool:
    colour = page.run("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour))) < 3 * 128


def _show(page: Page, width: int, colours: str) -> int:
    """Sets the window and the preferred colours; the width that the page takes."""
    sizes = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.do("Emulation.setDeviceMetricsOverride", **sizes)
    features = [{"name": "prefers-color-scheme", "value": colours}]
    page.do("Emulation.setEmulatedMedia", features=features)
    return page.run("document.documentElement.scrollWidth")


@pytest.mark.nightly
def test_the_page_learns_and_goes_on_after_a_reload(web: Path, page: Page, tmp_path: Path) -> None:
    """And gives the model away, asks for its own files alone, and fits a phone."""
    downloads = tmp_path / "downloads"
    page.do("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
    with serve(web) as url:
        page.open(url + "digits/index.html")
        page.until(f"/^Ready/.test({NEWS}.textContent)")
        before = int(_text(page, "right").split()[0])
        _click(page, "#go")
        _wait_for_steps(page, 400)
        for digit, strokes in ((1, ONE), (0, ZERO)):
            _draw(page, strokes)
            page.until("/What is it/.test(document.getElementById('question').textContent)")
            page.until(f"document.querySelector('#scores .best')?.textContent === '{digit}'")
            _click(page, f"#labels button:nth-child({digit + 1})")
            page.until("document.getElementById('clear').disabled")
        _wait_for_steps(page, _steps(page) + 50)
        _click(page, "#go")
        page.until(f"{NEWS}.textContent === 'Paused.'")
        page.until("document.querySelectorAll('#drawings .good').length === 2")
        assert int(_text(page, "right").split()[0]) > max(before, 80)
        assert "private files" in _text(page, "kept")
        model = onnx.load_from_string(_download(page, "model", downloads / "digits.onnx"))
        checkpoint = _download(page, "checkpoint", downloads / "digits.ckpt")
        steps, loss = _steps(page), _text(page, "loss")

        page.do("Page.reload")
        page.until(f"/^It goes on/.test({NEWS}?.textContent)")
        assert (_steps(page), _text(page, "loss")) == (steps, loss)
        assert page.run("document.querySelectorAll('#drawings li').length") == 2
        _click(page, "#go")
        _wait_for_steps(page, steps + 50)
        page.do("Page.reload")  # while it trains
        page.until(f"/^It goes on/.test({NEWS}?.textContent)")
        page.until("document.getElementById('go').textContent === 'Pause'")
        _wait_for_steps(page, _steps(page) + 20)
        _click(page, "#go")

        for width, colours in ((1100, "light"), (1100, "dark"), (360, "dark"), (320, "light")):
            assert _show(page, width, colours) <= width
            assert _is_dark(page) == (colours == "dark")
        write = "store.write('checkpoint', new Uint8Array([1, 2, 3]))"
        page.run(f"import('/store.js').then((s) => s.openStore('gradd-digits'))"
                 f".then((store) => {write})")  # fmt: skip
        page.do("Page.reload")
        page.until(f"/The network starts again: checkpoint: /.test({NEWS}?.textContent)")
        page.until("document.querySelectorAll('#drawings li').length === 2")
        _click(page, "#again")
        page.until(f"/^Ready/.test({NEWS}?.textContent) && document.readyState === 'complete'")
        page.until("document.getElementById('n-steps').textContent === '0'")
        assert page.run("document.querySelectorAll('#drawings li').length") == 2
        asked = {a for a in page.requests if not a.startswith((f"blob:{url}", "data:"))}
        assert asked == {url + name for name in (*FILES, "digits/checkpoint")}
    assert not page.problems
    _check_files(model, checkpoint, tmp_path)


def _check_files(model: onnx.ModelProto, checkpoint: bytes, folder: Path) -> None:
    """The model and the checkpoint that were taken along have the same parameters."""
    onnx.checker.check_model(model, full_check=True)
    x = np.zeros((2, 1, 28, 28), np.float32)
    x[:, 0, 4:24, 13:16] = 1
    (scores,) = ReferenceEvaluator(model).run(["scores"], {"x": x})
    assert scores.shape == (2, 10) and set(scores.argmax(1)) == {1}
    (folder / "checkpoint").write_bytes(checkpoint)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    values = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    assert len(list(state.parameters)) == 8
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, values[name])
    module = Module(WEB / "digits/training_model.onnx", state)
    _, native = module(x, np.array([1, 1]))
    np.testing.assert_allclose(native, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_the_store_says_where_it_keeps(web: Path, page: Page) -> None:
    """Private files, else a database, else memory alone; what was kept is there after a reload."""
    begin = "const {openStore} = await import('/store.js'); "
    no_files = "StorageManager.prototype.getDirectory = () => Promise.reject(Error('no files')); "
    no_database = "IDBFactory.prototype.open = () => { throw Error('no database'); }; "
    for before, kind, why, stays in (
        ("", "private files", "", True),
        (no_files, "database", "private files: no files", True),
        (no_files + no_database, "memory", "private files: no files; database: no database", False),
    ):
        with serve(web) as url:
            page.open(url + "digits/page.css")  # nothing runs there
            script = f"""(async () => {{ {before} {begin}
                const store = await openStore("test");
                const old = await store.read("a");
                await store.write("a", new Uint8Array([7, 8]));
                await store.write("a", new Uint8Array([9]));
                return [store.kind, store.why, old && [...old], [...await store.read("a")]];
            }})()"""
            assert page.run(script) == [kind, why, None, [9]]
            page.do("Page.reload")
            page.until("document.readyState === 'complete'")
            assert page.run(script) == [kind, why, [9] if stays else None, [9]]


@pytest.mark.nightly
def test_a_worker_that_fails_says_so(web: Path, page: Page) -> None:
    """Errors of a worker have code and sentence too; after a release nothing is left waiting."""
    with serve(web) as url:
        page.open(url + "digits/page.css")
        said = page.run("""(async () => {
            const {Tensor, TrainingSession} = await import("/gradd.js");
            const at = "/digits/";
            const trainModel = at + "training_model.onnx";
            const files = {checkpointState: at + "checkpoint", trainModel};
            const said = [];
            const hear = (does) => does().then(() => said.push("nothing"),
              ({name, code, message}) => said.push(`${name} ${code}: ${message}`));
            await hear(() => TrainingSession.create({...files, checkpointState: at + "nothing"}));
            await hear(() => TrainingSession.create({...files, trainModel: new Uint8Array(9)}));
            const session = await TrainingSession.create(files);
            await hear(() => session.runOptimizerStep());
            await hear(() => session.runEvalStep({}));
            const x = new Tensor("float32", new Float32Array(784), [1, 1, 28, 28]);
            const step = hear(() => session.runTrainStep({x, labels: new Tensor("int64", [1])}));
            const late = session.getParametersSize();
            await session.release();
            await hear(() => late);
            await step;
            globalThis.Worker = class { // as one whose script does not load
                postMessage() { queueMicrotask(() => this.onerror({})); }
                terminate() {}
            };
            await hear(() => TrainingSession.create(files));
            return [...said, session.evalInputNames.length];
        })()""")
    sentences = ["IO: cannot load", "MODEL: ", "UNSUPPORTED: ", "UNSUPPORTED: "]
    sentences += ["STALE: the session was released"] * 2
    sentences += ["STALE: the worker has ended: it did not load"]
    assert len(said) == 8 and said.pop() == 0
    for text, sentence in zip(said, sentences, strict=True):
        assert text.startswith(f"TrainError {sentence}"), said
