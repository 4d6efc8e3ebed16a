package ai.gradd.train;

import java.nio.file.Path;

/** An optimizer and its constants, as gradd_train_optimizer_t has them. */
public final class Optimizer {
    private static final int CLIP = 8; // see the order in gradd_train_jni.c
    private static final int DECAY = 7;
    private static final int MOMENTUM = 6;
    final double[] constants;

    private Optimizer(double[] constants) {
        this.constants = constants;
    }

    /** torch's AdamW: 0.9, 0.999, 1e-8, weight decay 0.01, bias correction. */
    public static Optimizer adamw() {
        return new Optimizer(Native.defaults(false));
    }

    /** Without momentum and weight decay. */
    public static Optimizer sgd() {
        return new Optimizer(Native.defaults(true));
    }

    /** Kind and constants of an optimizer model, as ONNX Runtime writes them. */
    public static Optimizer load(Path model) throws TrainException {
        return new Optimizer(Native.loadOptimizer(Native.utf8(model), null));
    }

    public static Optimizer load(byte[] model) throws TrainException {
        return new Optimizer(Native.loadOptimizer(null, model));
    }

    /** The same with the norm of all gradients clipped; 0 = not clipped. */
    public Optimizer maxNorm(double norm) {
        return with(CLIP, norm);
    }

    public Optimizer weightDecay(double decay) {
        return with(DECAY, decay);
    }

    /** Of SGD. */
    public Optimizer momentum(double momentum) {
        return with(MOMENTUM, momentum);
    }

    private Optimizer with(int at, double value) {
        double[] changed = constants.clone();
        changed[at] = value;
        return new Optimizer(changed);
    }
}
