import ai.gradd.train.Tensor;
import ai.gradd.train.TrainingSession;
import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Locale;

/** Trains MNIST with libgradd_train: Mnist DATA FILES [EPOCHS]. */
public final class Mnist {
    private static final int PIXELS = 784;
    private static final int CLASSES = 10;
    private static final int ROWS = 64;
    private final float[] pictures;
    private final long[] labels;

    private Mnist(Path data, String kind) throws IOException {
        byte[] pixels = Files.readAllBytes(data.resolve(kind + "-images-idx3-ubyte"));
        byte[] digits = Files.readAllBytes(data.resolve(kind + "-labels-idx1-ubyte"));
        pictures = new float[pixels.length - 16];
        labels = new long[digits.length - 8];
        for (int i = 0; i < pictures.length; i++) {
            pictures[i] = (pixels[16 + i] & 255) / 255f;
        }
        for (int i = 0; i < labels.length; i++) {
            labels[i] = digits[8 + i];
        }
    }

    /** Pictures and labels of rows from `at` on, at most `rows`. */
    private Tensor[] batch(int at, int rows) {
        int n = Math.min(rows, labels.length - at);
        FloatBuffer x = FloatBuffer.wrap(pictures, at * PIXELS, n * PIXELS);
        LongBuffer y = LongBuffer.wrap(labels, at, n);
        return new Tensor[] {Tensor.createTensor(x, n, PIXELS), Tensor.createTensor(y, n)};
    }

    private double train(TrainingSession session) throws Exception {
        double sum = 0;
        int steps = 0;
        for (int at = 0; at < labels.length; at += ROWS, steps++) {
            sum += session.trainStep(batch(at, ROWS))[0].getFloat();
            session.optimizerStep();
            session.lazyResetGrad();
        }
        return sum / steps;
    }

    private int test(TrainingSession session) throws Exception {
        FloatBuffer scores = session.evalStep(batch(0, labels.length))[1].getFloatBuffer();
        int right = 0;
        for (int i = 0; i < labels.length; i++) {
            int best = 0;
            for (int k = 1; k < CLASSES; k++) {
                if (scores.get(i * CLASSES + k) > scores.get(i * CLASSES + best)) {
                    best = k;
                }
            }
            right += best == labels[i] ? 1 : 0;
        }
        return right;
    }

    public static void main(String[] words) throws Exception {
        Path files = Path.of(words[1]);
        Mnist digits = new Mnist(Path.of(words[0]), "train");
        Mnist others = new Mnist(Path.of(words[0]), "t10k");
        int epochs = words.length > 2 ? Integer.parseInt(words[2]) : 1;
        try (TrainingSession session =
                TrainingSession.createTrainingSession(
                        files.resolve("checkpoint"),
                        files.resolve("training_model.onnx"),
                        files.resolve("eval_model.onnx"),
                        files.resolve("optimizer_model.onnx"))) {
            for (int epoch = 1; epoch <= epochs; epoch++) {
                System.out.printf(
                        Locale.ROOT,
                        "epoch %d: loss %.4f, %d of %d right%n",
                        epoch,
                        digits.train(session),
                        others.test(session),
                        others.labels.length);
            }
            session.exportModelForInference(files.resolve("mnist.onnx"), "scores");
        }
    }
}
