package ai.gradd.train;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.Map;
import java.util.Set;

/**
 * Trains a state with a model, in process. Methods have the names of ONNX Runtime's
 * OrtTrainingSession.
 *
 * <p>Steps take all inputs of the model; what they give is the caller's, a copy. Calls wait for one
 * another, but for setTerminate.
 */
public final class TrainingSession implements AutoCloseable {
    private final CheckpointState state;
    private final boolean ownsState;
    private final ByteBuffer terminate = ByteBuffer.allocateDirect(Integer.BYTES);
    private long handle;

    /** What a session is made of. */
    public static final class Options {
        private final byte[][] models = new byte[4][]; // path and bytes of training and of eval
        private final long[] numbers = new long[4]; // threads, plans, budget, seed
        private Optimizer optimizer;

        /** Required, from a file or from memory. */
        public Options training(Path path) {
            return model(0, Native.utf8(path));
        }

        public Options training(byte[] model) {
            return model(1, model);
        }

        /** Without it eval steps and export fail. */
        public Options eval(Path path) {
            return model(2, Native.utf8(path));
        }

        public Options eval(byte[] model) {
            return model(3, model);
        }

        /** Without it steps of the optimizer fail. */
        public Options optimizer(Optimizer value) {
            optimizer = value;
            return this;
        }

        /** 0 = as many as the process may use. */
        public Options threads(int value) {
            return number(0, value);
        }

        /** Shapes of inputs whose plans are kept; 0 = the default. */
        public Options maxPlans(int value) {
            return number(1, value);
        }

        /** Most bytes of activations and workspace in a step; 0 = what it takes. */
        public Options memoryBudget(long value) {
            return number(2, value);
        }

        /** Of the random numbers of a new state. */
        public Options seed(long value) {
            return number(3, value);
        }

        private Options model(int at, byte[] value) {
            models[at] = value;
            return this;
        }

        private Options number(int at, long value) {
            numbers[at] = value;
            return this;
        }
    }

    /** Trains a state, which outlives the session. */
    public TrainingSession(CheckpointState state, Options options) throws TrainException {
        this(state, options, false);
    }

    private TrainingSession(CheckpointState state, Options options, boolean ownsState)
            throws TrainException {
        this.state = state;
        this.ownsState = ownsState;
        Optimizer optimizer = options.optimizer;
        double[] constants = optimizer == null ? null : optimizer.constants;
        synchronized (state) {
            handle = Native.open(state.handle(), options.models, constants, options.numbers);
            state.inSession = true;
        }
    }

    /** Of the four files of generate_artifacts; eval and optimizer may be null. */
    public static TrainingSession createTrainingSession(
            Path checkpoint, Path training, Path eval, Path optimizer) throws TrainException {
        Options options = new Options().training(training).eval(eval);
        if (optimizer != null) {
            options.optimizer(Optimizer.load(optimizer));
        }
        CheckpointState state = CheckpointState.loadCheckpoint(checkpoint);
        try {
            return new TrainingSession(state, options, true);
        } catch (TrainException | RuntimeException e) {
            state.close();
            throw e;
        }
    }

    /** Forward and backward, which adds to the gradients. Inputs in the model's order. */
    public Tensor[] trainStep(Tensor... inputs) throws TrainException {
        return step(false, inputs);
    }

    public Map<String, Tensor> trainStep(Map<String, Tensor> inputs) throws TrainException {
        return step(false, inputs);
    }

    /** A forward of the eval model, which changes nothing. */
    public Tensor[] evalStep(Tensor... inputs) throws TrainException {
        return step(true, inputs);
    }

    public Map<String, Tensor> evalStep(Map<String, Tensor> inputs) throws TrainException {
        return step(true, inputs);
    }

    /** From any thread: the step that runs ends, and others fail, with STALE, until it is false. */
    public void setTerminate(boolean value) {
        Native.setTerminate(terminate, value);
    }

    /** The norm of all gradients before clipping, 0 if they are not clipped. */
    public double optimizerStep() throws TrainException {
        synchronized (state) {
            return Native.optimizerStep(handle());
        }
    }

    /** The next step's gradients replace those there are. */
    public void lazyResetGrad() {
        synchronized (state) {
            Native.lazyResetGrad(handle());
        }
    }

    public void setLearningRate(float rate) throws TrainException {
        synchronized (state) {
            Native.setLearningRate(handle(), rate);
        }
    }

    public float getLearningRate() {
        synchronized (state) {
            return Native.learningRate(handle());
        }
    }

    /** From 0 to the initial rate in the steps of the warm-up, then to 0 in the last one. */
    public void registerLinearLRScheduler(long warmupStepCount, long totalStepCount, float initial)
            throws TrainException {
        synchronized (state) {
            Native.linearSchedule(handle(), warmupStepCount, totalStepCount, initial);
        }
    }

    public void schedulerStep() throws TrainException {
        synchronized (state) {
            Native.scheduleStep(handle());
        }
    }

    /** Starts the random numbers of the steps that follow again. */
    public void setSeed(long seed) {
        synchronized (state) {
            Native.setSeed(handle(), seed);
        }
    }

    /** No longer trains the parameters that match, "*" for any characters: so many were trained. */
    public int freeze(String pattern) throws TrainException {
        synchronized (state) {
            return Native.select(handle(), Native.utf8(pattern), false);
        }
    }

    /** Trains the parameters that match: so many were frozen. */
    public int thaw(String pattern) throws TrainException {
        synchronized (state) {
            return Native.select(handle(), Native.utf8(pattern), true);
        }
    }

    /** The values of all parameters, or of the trainable ones, one after the other. */
    public float[] getContiguousParameters(boolean trainableOnly) throws TrainException {
        synchronized (state) {
            long count = Native.contiguousCount(handle(), trainableOnly);
            float[] values = new float[Math.toIntExact(count)];
            Native.copyOut(handle, trainableOnly, values);
            return values;
        }
    }

    public void copyBufferToParameters(float[] values, boolean trainableOnly)
            throws TrainException {
        synchronized (state) {
            Native.copyIn(handle(), trainableOnly, values);
        }
    }

    public void saveCheckpoint(Path path, boolean saveOptimizer) throws TrainException {
        state.saveCheckpoint(path, saveOptimizer);
    }

    /** What these outputs of the eval model need, with the parameters inside. */
    public void exportModelForInference(Path path, String... outputNames) throws TrainException {
        byte[][] names = Arrays.stream(outputNames).map(Native::utf8).toArray(byte[][]::new);
        synchronized (state) {
            Native.export(handle(), Native.utf8(path), names);
        }
    }

    public Set<String> getTrainInputNames() {
        return names(false, false);
    }

    public Set<String> getTrainOutputNames() {
        return names(false, true);
    }

    public Set<String> getEvalInputNames() {
        return names(true, false);
    }

    public Set<String> getEvalOutputNames() {
        return names(true, true);
    }

    /** Parameters and gradients by name, properties, files. */
    public CheckpointState getState() {
        return state;
    }

    /** Gradients go with it; and the state, if createTrainingSession has made it. */
    @Override
    public void close() {
        synchronized (state) {
            if (handle == 0) {
                return;
            }
            Native.close(handle);
            handle = 0;
            state.inSession = false;
            if (ownsState) {
                state.close();
            }
        }
    }

    private long handle() {
        if (handle == 0) {
            throw new IllegalStateException("this session is closed");
        }
        return handle;
    }

    private Set<String> names(boolean eval, boolean outputs) {
        synchronized (state) {
            Set<String> names = new LinkedHashSet<>();
            for (byte[] name : Native.names(handle(), eval, outputs)) {
                names.add(Native.text(name));
            }
            return names;
        }
    }

    private Tensor[] step(boolean eval, Tensor[] inputs) throws TrainException {
        long[][] types = new long[inputs.length][];
        Buffer[] data = new Buffer[inputs.length];
        for (int i = 0; i < inputs.length; i++) {
            types[i] = inputs[i].typed();
            data[i] = inputs[i].data;
        }
        synchronized (state) {
            Object[] parts = Native.step(handle(), eval, types, data, terminate);
            Tensor[] outputs = new Tensor[parts.length / 2];
            for (int i = 0; i < outputs.length; i++) {
                outputs[i] = Tensor.copied(parts[2 * i], parts[2 * i + 1]);
            }
            return outputs;
        }
    }

    private Map<String, Tensor> step(boolean eval, Map<String, Tensor> inputs)
            throws TrainException {
        synchronized (state) {
            Set<String> wanted = names(eval, false);
            if (!wanted.equals(inputs.keySet())) {
                throw new IllegalArgumentException(
                        "expected the inputs " + wanted + ", got " + inputs.keySet());
            }
            Tensor[] outputs = step(eval, wanted.stream().map(inputs::get).toArray(Tensor[]::new));
            Map<String, Tensor> named = new LinkedHashMap<>();
            int i = 0;
            for (String name : names(eval, true)) {
                named.put(name, outputs[i++]);
            }
            return named;
        }
    }
}
