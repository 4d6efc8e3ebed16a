// tests/c/train/device_program.cc for C#: the same training, and the same lines. With "sizes" in
// place of a model it prints the sizes of the structures that it shares with C; with a second path,
// it goes on there with what else the classes do.
using System;
using System.Globalization;
using System.IO;
using System.Linq;
using Gradd.Train;

internal static unsafe class Line
{
    private static readonly Tensor X = new Tensor(new float[] { 1, 0, 0, 1, 1, 1, 2, 1 }, 4, 2);
    private static readonly Tensor Y = new Tensor(new float[] { 3, -1, 2, 5 }, 4, 1);

    private static int Bits(float value) => BitConverter.ToInt32(BitConverter.GetBytes(value), 0);

    private static string Of(TrainException e) => e.Status + ": " + e.Message;

    private static void Print(FormattableString line) =>
        Console.WriteLine(line.ToString(CultureInfo.InvariantCulture));

    private static CheckpointState Start()
    {
        var state = new CheckpointState();
        state.AddParameter("w", new Tensor(new float[2], 2, 1));
        return state;
    }

    private static void Train(string model)
    {
        var options = new SessionOptions { Training = model, Optimizer = Optimizer.Sgd(), Threads = 1 };
        using (CheckpointState state = Start())
        {
            state.AddProperty("epoch", 3L);
            state.AddProperty("name", "line");
            using (var session = new TrainingSession(state, options))
            {
                session.SetLearningRate(0.25f);
                float loss = 0;
                for (int i = 0; i < 200; i++)
                {
                    session.LazyResetGrad();
                    loss = session.TrainStep(X, Y)[0].Float;
                    session.OptimizerStep();
                }
                float[] w = session.ToBuffer(false);
                Print($"{loss:F3} {w[0]:F3} {w[1]:F3}");
                Print($"bits {Bits(loss):x8} {Bits(w[0]):x8} {Bits(w[1]):x8}");
                Print($"{session.InputNames(true)[1]} {state.GetProperty("epoch")} {state.GetProperty("name")}");
                try
                {
                    session.TrainStep(X);
                }
                catch (TrainException e)
                {
                    Console.WriteLine(Of(e));
                }
                session.Freeze("v*");
            }
        }
    }

    private static void Hold(bool condition, string what)
    {
        if (!condition)
        {
            throw new Exception(what);
        }
    }

    private static void Fails(string words, Action act)
    {
        string said = "nothing failed";
        try
        {
            act();
        }
        catch (Exception e)
        {
            said = e is TrainException ? Of((TrainException)e) : e.ToString();
        }
        Hold(said.Contains(words), "expected '" + words + "', got: " + said);
    }

    private static void More(string model, string folder)
    {
        string file = Path.Combine(folder, "csharp.state");
        string checkpoint = Path.Combine(folder, "csharp.checkpoint");
        using (CheckpointState state = Start())
        {
            state.AddProperty("rate", 0.5f);
            state.AddProperty("name", "\u00fc \ud83d\ude00");
            state.SaveCheckpoint(checkpoint, false);
            Fails("a property of type", () => state.AddProperty("rate", 0.5));
        }
        for (int run = 0; run < 2; run++)
        {
            using (CheckpointState state = CheckpointState.Open(file, checkpoint, 1))
            {
                Hold(state.Step == run && state.Position == run, "committed");
                Hold(state.GetProperty("rate").Equals(0.5f), "a float");
                Hold(state.GetProperty("name").Equals("\u00fc \ud83d\ude00"), "a text");
                Hold(state.GetProperty("nothing") == null, "no property");
                Fails("STALE: ", () => CheckpointState.Open(file, null));
                var options = new SessionOptions { Training = model, Eval = model, Optimizer = Optimizer.AdamW() };
                using (var session = new TrainingSession(state, options))
                {
                    Fails("the session of this state is open", state.Dispose);
                    session.RegisterLinearLRScheduler(0, 10, 0.5f);
                    session.SetTerminate(true);
                    Fails("STALE: ", () => session.TrainStep(X, Y));
                    session.SetTerminate(false);
                    float loss = session.TrainStep(X, Y)[0].Float;
                    Hold(session.EvalStep(X, Y)[0].Float == loss, "eval");
                    Hold(state.GetGradient("w").Shape.SequenceEqual(new long[] { 2, 1 }), "a gradient");
                    session.OptimizerStep();
                    session.LazyResetGrad();
                    session.SchedulerStep();
                    session.SetSeed(3);
                    Hold(session.GetLearningRate() == 0.5f * (9 - run) / 10, "the rate");
                    state.Position = run + 1;
                    state.Commit();
                    session.FromBuffer(new float[] { 3, -1 }, false);
                    Hold(((float[])state.GetParameter("w").Values)[1] == -1, "values");
                    state.UpdateParameter("w", new Tensor(new float[] { 1, 2 }, 2, 1));
                    Hold(session.ToBuffer(true)[1] == 2, "written");
                    Hold(session.OutputNames(true).Contains("loss"), "outputs");
                    session.ExportModelForInferencing(Path.Combine(folder, "csharp.onnx"), "loss");
                    Fails("no such output", () => session.ExportModelForInferencing("no.onnx", "no such output"));
                }
            }
        }
        CheckpointState last = CheckpointState.LoadCheckpoint(File.ReadAllBytes(checkpoint));
        Hold(last.ParameterNames.SequenceEqual(new[] { "w" }), "names");
        Fails("there is no parameter 'v'", () => last.GetParameter("v"));
        last.Dispose();
        last.Dispose();
        Fails("ObjectDisposed", () => last.Commit());
        Fails("IO: ", () => CheckpointState.LoadCheckpoint(file + ".no"));
        Fails("MODEL: ", () => CheckpointState.LoadCheckpoint(new byte[10]));
        Fails("IO: ", () => Optimizer.Load(file + ".no"));
        Fails("a zero inside", () => CheckpointState.LoadCheckpoint("a\0b"));
        Fails("8 elements for the shape [4, 3]", () => new Tensor(X.Values, 4, 3));
        Fails("a tensor of System.String[]", () => new Tensor(new string[1], 1));
    }

    private static int Main(string[] words)
    {
        if (words[0] == "sizes")
        {
            Console.WriteLine("[" + string.Join(", ", Sizes.Of()) + "]");
            return 0;
        }
        try
        {
            Train(words[0]);
        }
        catch (TrainException e)
        {
            Console.WriteLine(Of(e));
            if (e.Status != "TENSOR")
            {
                return 1;
            }
        }
        if (words.Length > 1)
        {
            More(words[0], words[1]);
        }
        return 0;
    }
}
