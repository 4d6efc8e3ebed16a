import ai.gradd.train.CheckpointState;
import ai.gradd.train.Optimizer;
import ai.gradd.train.Tensor;
import ai.gradd.train.TrainException;
import ai.gradd.train.TrainingSession;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;

/** tests/c/train/device_program.cc for Java: the same training, and the same lines. */
public final class Line {
    private static TrainingSession open(CheckpointState state, Path model) throws TrainException {
        return new TrainingSession(
                state,
                new TrainingSession.Options()
                        .training(model)
                        .optimizer(Optimizer.sgd())
                        .threads(1));
    }

    private static void train(Path model) throws TrainException {
        Tensor x = Tensor.createTensor(new float[] {1, 0, 0, 1, 1, 1, 2, 1}, 4, 2);
        Tensor y = Tensor.createTensor(new float[] {3, -1, 2, 5}, 4, 1);
        try (CheckpointState state = new CheckpointState()) {
            state.addParameter("w", Tensor.createTensor(new float[2], 2, 1), true);
            state.addProperty("epoch", 3);
            state.addProperty("name", "line");
            try (TrainingSession session = open(state, model)) {
                session.setLearningRate(0.25f);
                float loss = 0;
                for (int i = 0; i < 200; i++) {
                    session.lazyResetGrad();
                    loss = session.trainStep(x, y)[0].getFloat();
                    session.optimizerStep();
                }
                float[] w = session.getContiguousParameters(false);
                System.out.printf(Locale.ROOT, "%.3f %.3f %.3f%n", loss, w[0], w[1]);
                System.out.printf("bits %08x %08x %08x%n", bits(loss), bits(w[0]), bits(w[1]));
                List<String> names = new ArrayList<>(session.getTrainInputNames());
                System.out.println(
                        names.get(1)
                                + " "
                                + state.getIntProperty("epoch")
                                + " "
                                + state.getStringProperty("name"));
                try {
                    session.trainStep(x);
                } catch (TrainException e) {
                    System.out.println(e);
                }
                session.freeze("v*");
            }
        }
    }

    private static int bits(float value) {
        return Float.floatToRawIntBits(value);
    }

    public static void main(String[] paths) throws TrainException {
        try {
            train(Path.of(paths[0]));
        } catch (TrainException e) {
            System.out.println(e);
            System.exit(e.getStatus().equals("TENSOR") ? 0 : 1);
        }
    }
}
