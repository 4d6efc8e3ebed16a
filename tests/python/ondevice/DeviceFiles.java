import ai.gradd.train.CheckpointState;
import ai.gradd.train.Optimizer;
import ai.gradd.train.Tensor;
import ai.gradd.train.TrainException;
import ai.gradd.train.TrainingSession;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Map;
import java.util.concurrent.Callable;

/**
 * All methods of the Java classes that Line.java does not call, on the files of generate_artifacts
 * in the folder that is the first argument: x [rows, 4], labels [rows]. Prints the losses of ten
 * steps, for a comparison with Python, and writes java.checkpoint, java.onnx and, from the weights
 * in global.f32, update.f32 there.
 */
final class DeviceFiles {
    private static final int ROWS = 5;
    private static final int IN = 4;
    private final Path folder;

    private DeviceFiles(Path folder) {
        this.folder = folder;
    }

    private static void hold(boolean condition, Object what) {
        if (!condition) {
            throw new AssertionError(what);
        }
    }

    private static void fails(String words, Callable<?> call) throws Exception {
        try {
            call.call();
        } catch (TrainException | RuntimeException e) {
            hold(e.toString().contains(words), "expected '" + words + "', got: " + e);
            return;
        }
        throw new AssertionError("nothing failed with '" + words + "'");
    }

    private Path file(String name) {
        return folder.resolve(name);
    }

    /** In a caller's direct memory, behind other elements. */
    private static Tensor input() {
        ByteBuffer memory = ByteBuffer.allocateDirect(4 * (3 + ROWS * IN));
        FloatBuffer values = memory.order(ByteOrder.nativeOrder()).asFloatBuffer();
        values.position(3);
        for (int i = 0; i < ROWS * IN; i++) {
            values.put(3 + i, (i % 7 - 3) / 4f);
        }
        return Tensor.createTensor(values, ROWS, IN);
    }

    private static Tensor labels() {
        return Tensor.createTensor(new long[] {0, 1, 2, 1, 0}, ROWS);
    }

    private TrainingSession session() throws TrainException {
        return TrainingSession.createTrainingSession(
                file("checkpoint"),
                file("training_model.onnx"),
                file("eval_model.onnx"),
                file("optimizer_model.onnx"));
    }

    private void trains() throws Exception {
        try (TrainingSession session = session()) {
            String x = session.getTrainInputNames().iterator().next();
            hold(session.getTrainInputNames().equals(session.getEvalInputNames()), "names");
            hold(session.getTrainOutputNames().size() >= 1, "a loss");
            hold(session.getEvalOutputNames().size() >= 1, "outputs");
            session.registerLinearLRScheduler(2, 100, 0.125f);
            for (int i = 0; i < 10; i++) {
                Tensor loss = session.trainStep(input(), labels())[0];
                System.out.println(loss.getFloat());
                session.optimizerStep();
                session.schedulerStep();
                session.lazyResetGrad();
            }
            hold(session.getLearningRate() == 0.125f * 90 / 98, session.getLearningRate());
            hold(session.getState().getStep() == 10, session.getState().getStep());
            session.saveCheckpoint(file("java.checkpoint"), true);
            session.exportModelForInference(file("java.onnx"), "scores");
            fails("no such output", () -> {
                session.exportModelForInference(file("no.onnx"), "no such output");
                return null;
            });
            fails("TENSOR: ", () -> session.trainStep(input()));
            fails("expected the inputs", () -> session.trainStep(Map.of(x, input())));
            Tensor[] byPlace = session.evalStep(input(), labels());
            Map<String, Tensor> byName = session.evalStep(named(session));
            hold(byName.keySet().equals(session.getEvalOutputNames()), byName);
            hold(byName.values().iterator().next().getFloat() == byPlace[0].getFloat(), "eval");
            hold(session.trainStep(named(session)).containsKey(loss(session)), "by name");
            stops(session);
            chooses(session);
            copies(session);
        }
    }

    private static String loss(TrainingSession session) {
        return session.getTrainOutputNames().iterator().next();
    }

    private static Map<String, Tensor> named(TrainingSession session) {
        String[] names = session.getTrainInputNames().toArray(new String[0]);
        return Map.of(names[0], input(), names[1], labels());
    }

    private static void stops(TrainingSession session) throws Exception {
        session.setTerminate(true);
        fails("STALE: ", () -> session.trainStep(input(), labels()));
        session.setTerminate(false);
        session.trainStep(input(), labels());
    }

    private static void chooses(TrainingSession session) throws Exception {
        CheckpointState state = session.getState();
        hold(state.getGradient("fc1.weight") != null, "a gradient");
        hold(session.freeze("fc1.*") == 2, "two frozen");
        hold(!state.requiresGrad("fc1.weight") && state.requiresGrad("fc2.weight"), "chosen");
        hold(state.getGradient("fc1.weight") == null, "no gradient");
        hold(session.getContiguousParameters(true).length == 3 * 6 + 3, "the head alone");
        hold(session.thaw("fc1.*") == 2, "two thawed");
        fails("no parameter of the model matches", () -> session.thaw("nothing*"));
        fails("there is no parameter 'w'", () -> state.getParameter("w"));
    }

    private static void copies(TrainingSession session) throws Exception {
        CheckpointState state = session.getState();
        float[] values = session.getContiguousParameters(false);
        Arrays.fill(values, 0.5f);
        session.copyBufferToParameters(values, false);
        Tensor bias = state.getParameter("fc2.bias");
        hold(Arrays.equals(bias.getShape(), new long[] {3}), Arrays.toString(bias.getShape()));
        hold(bias.getType() == Tensor.Type.F32 && bias.getFloatBuffer().get(2) == 0.5f, "values");
        state.updateParameter("fc2.bias", Tensor.createTensor(new float[] {1, 2, 3}, 3));
        hold(state.getParameter("fc2.bias").getFloatBuffer().get(2) == 3, "written");
        Tensor four = Tensor.createTensor(new float[4], 4);
        fails("TENSOR: ", () -> {
            state.updateParameter("fc2.bias", four);
            return null;
        });
        fails("TENSOR: ", () -> {
            session.copyBufferToParameters(new float[1], false);
            return null;
        });
        fails("LIMIT: ", () -> {
            Tensor deep = Tensor.createTensor(new float[1], 1, 1, 1, 1, 1, 1, 1, 1, 1);
            state.addParameter("deep", deep, true);
            return null;
        });
    }

    private TrainingSession.Options fromMemory() throws Exception {
        return new TrainingSession.Options()
                .training(Files.readAllBytes(file("training_model.onnx")))
                .eval(Files.readAllBytes(file("eval_model.onnx")))
                .optimizer(Optimizer.load(Files.readAllBytes(file("optimizer_model.onnx"))))
                .threads(1)
                .maxPlans(2)
                .memoryBudget(1 << 20)
                .seed(7);
    }

    private void lasts() throws Exception {
        Path path = file("java.state");
        byte[] start = Files.readAllBytes(file("checkpoint"));
        for (int run = 0; run < 2; run++) {
            try (CheckpointState state = CheckpointState.open(path, file("checkpoint"), 1)) {
                hold(state.getPosition() == run && state.getStep() == run, state.getPosition());
                try (TrainingSession session = new TrainingSession(state, fromMemory())) {
                    fails("the session of this state is open", () -> {
                        state.close();
                        return null;
                    });
                    fails("STALE: ", () -> new TrainingSession(state, fromMemory()));
                    fails("STALE: ", () -> CheckpointState.open(path, null, 1));
                    session.setSeed(3);
                    session.setLearningRate(0.5f);
                    session.trainStep(input(), labels());
                    session.optimizerStep();
                    session.lazyResetGrad();
                    state.setPosition(run + 1);
                    state.commit();
                }
            }
        }
        try (CheckpointState state = CheckpointState.loadCheckpoint(start)) {
            state.addProperty("rate", 0.1f);
            state.addProperty("name", "\u00fc \ud83d\ude00");
            state.addProperty("n", -5_000_000_000L);
            state.keep(file("kept.state"), 0);
        }
        CheckpointState state = CheckpointState.open(file("kept.state"), null, 0);
        hold(state.getFloatProperty("rate") == 0.1f, "a float");
        hold(state.getStringProperty("name").equals("\u00fc \ud83d\ude00"), "a text");
        hold(state.getIntProperty("n") == -5_000_000_000L, "an integer");
        fails("no such property", () -> state.getIntProperty("rate"));
        hold(state.getParameterNames().contains("fc1.weight"), state.getParameterNames());
        state.close();
        state.close();
        fails("this state is closed", state::getStep);
        fails("IO: ", () -> CheckpointState.open(file("no.state"), null, 0));
        fails("MODEL: ", () -> CheckpointState.loadCheckpoint(new byte[10]));
        fails("IO: ", () -> CheckpointState.loadCheckpoint(file("nothing")));
        fails("IO: ", () -> Optimizer.load(file("nothing")));
        fails("a zero inside", () -> new CheckpointState().getParameter("a\0b"));
    }

    /** A round of a federation: from global weights in a file to the difference in another. */
    private void updates() throws Exception {
        FloatBuffer global = floats(Files.readAllBytes(file("global.f32")));
        float[] before = new float[global.remaining()];
        global.get(before);
        try (CheckpointState state = CheckpointState.loadCheckpoint(file("nominal_checkpoint"));
                TrainingSession session = new TrainingSession(state, fromMemory())) {
            hold(state.getParameter("fc1.bias") == null, "no values in a nominal checkpoint");
            fails("fc1", () -> session.trainStep(input(), labels()));
            session.copyBufferToParameters(before, false);
            for (int i = 0; i < 5; i++) {
                session.trainStep(input(), labels());
                session.optimizerStep();
                session.lazyResetGrad();
            }
            float[] after = session.getContiguousParameters(false);
            ByteBuffer update = ByteBuffer.allocate(4 * after.length).order(ByteOrder.nativeOrder());
            for (int i = 0; i < after.length; i++) {
                update.putFloat(after[i] - before[i]);
            }
            Files.write(file("update.f32"), update.array());
        }
    }

    private static FloatBuffer floats(byte[] bytes) {
        return ByteBuffer.wrap(bytes).order(ByteOrder.nativeOrder()).asFloatBuffer();
    }

    private static void makesTensors() throws Exception {
        FloatBuffer swapped = ByteBuffer.allocateDirect(8).asFloatBuffer(); // big-endian
        swapped.put(0, 1.5f);
        hold(Tensor.createTensor(swapped, 2).getFloatBuffer().get(0) == 1.5f, "big-endian");
        LongBuffer part = LongBuffer.wrap(new long[] {1, 2, 3});
        part.position(1);
        hold(Tensor.createTensor(part, 2).getLongBuffer().get(0) == 2, "from its position");
        hold(Tensor.createTensor(new int[] {4}, 1).getIntBuffer().get(0) == 4, "an int");
        ByteBuffer bytes = ByteBuffer.wrap(new byte[] {1, 0, 1});
        Tensor flags = Tensor.createTensor(bytes, Tensor.Type.BOOL, 3);
        hold(flags.getByteBuffer().get(2) == 1, "a bool");
        fails("a tensor of BOOL", flags::getFloatBuffer);
        fails("3 bytes are no elements", () -> Tensor.createTensor(bytes, Tensor.Type.F32, 1));
        fails("2 elements for the shape [3]", () -> Tensor.createTensor(new float[2], 3));
        fails("a negative size", () -> Tensor.createTensor(new float[2], -1, -2));
        fails("overflow", () -> Tensor.createTensor(new float[0], 1L << 40, 1L << 40));
    }

    public static void main(String[] folders) throws Exception {
        DeviceFiles here = new DeviceFiles(Path.of(folders[0]));
        here.trains();
        here.lasts();
        here.updates();
        makesTensors();
    }
}
