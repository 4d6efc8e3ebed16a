import ai.gradd.train.CheckpointState;
import ai.gradd.train.Optimizer;
import ai.gradd.train.Tensor;
import ai.gradd.train.TrainingSession;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;

/** A client's round, as client.c says it: RoundClient FILES DATA RATE. */
final class RoundClient {
    private static final int IN = 4;

    private static ByteBuffer read(Path path) throws Exception {
        return ByteBuffer.wrap(Files.readAllBytes(path)).order(ByteOrder.nativeOrder());
    }

    public static void main(String[] words) throws Exception {
        Path files = Path.of(words[0]);
        Path data = Path.of(words[1]);
        double loss = 0;
        long rows = 0;
        TrainingSession.Options options =
                new TrainingSession.Options()
                        .training(files.resolve("training_model.onnx"))
                        .optimizer(Optimizer.load(files.resolve("optimizer_model.onnx")));
        CheckpointState state = CheckpointState.loadCheckpoint(files.resolve("nominal_checkpoint"));
        try (TrainingSession session = new TrainingSession(state, options)) {
            float[] weights = new float[(int) Files.size(data.resolve("global.f32")) / 4];
            read(data.resolve("global.f32")).asFloatBuffer().get(weights);
            session.copyBufferToParameters(weights, false);
            float[] before = session.getContiguousParameters(true);
            session.setLearningRate(Float.parseFloat(words[2]));
            for (int k = 0; k < 2; k++) {
                ByteBuffer x = read(data.resolve("x" + k + ".f32"));
                ByteBuffer y = read(data.resolve("y" + k + ".i64"));
                int n = y.remaining() / 8;
                Tensor inputs = Tensor.createTensor(x.asFloatBuffer(), n, IN);
                Tensor labels = Tensor.createTensor(y.asLongBuffer(), n);
                loss += n * (double) session.trainStep(inputs, labels)[0].getFloat();
                rows += n;
                session.optimizerStep();
                session.lazyResetGrad();
            }
            float[] after = session.getContiguousParameters(true);
            ByteBuffer update = ByteBuffer.allocate(4 * after.length).order(ByteOrder.nativeOrder());
            for (int i = 0; i < after.length; i++) {
                update.putFloat(after[i] - before[i]);
            }
            Files.write(data.resolve("update.f32"), update.array());
        }
        System.out.println(rows + " " + loss / rows);
    }
}
