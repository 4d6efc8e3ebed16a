//! tests/c/train/device_program.cc for Rust: the same training, and the same lines. With "sizes"
//! in place of a model it prints the sizes of the structures that it shares with C; with a second
//! path, it goes on there with what else the crate does.

use gradd_train::{Error, Model, Optimizer, Options, Phase, Property, Session, State, Tensor};
use std::path::Path;
use std::sync::atomic::AtomicI32;

const X: [f32; 8] = [1., 0., 0., 1., 1., 1., 2., 1.];
const Y: [f32; 4] = [3., -1., 2., 5.];

fn open(state: State, path: &str) -> Result<Session, Error> {
    let mut options = Options::new(Model::path(path));
    options.optimizer = Some(Optimizer::sgd());
    options.threads = 1;
    Session::open(state, &options)
}

fn train(path: &str) -> Result<(), Error> {
    let (x, y) = (Tensor::new(&X, &[4, 2])?, Tensor::new(&Y, &[4, 1])?);
    let mut state = State::new()?;
    state.add("w", &Tensor::new(&[0f32, 0.], &[2, 1])?, true)?;
    state.set_property("epoch", &Property::Int(3))?;
    state.set_property("name", &Property::Text("line".to_string()))?;
    let mut session = open(state, path)?;
    session.set_learning_rate(0.25)?;
    let mut loss = 0f32;
    for _ in 0..200 {
        session.lazy_reset_grad();
        loss = session.step(&[x, y])?[0].elements::<f32>()?[0];
        session.optimizer_step()?;
    }
    let w = session.parameters(false)?;
    println!("{:.3} {:.3} {:.3}", loss, w[0], w[1]);
    let bits = [loss, w[0], w[1]].map(f32::to_bits);
    println!("bits {:08x} {:08x} {:08x}", bits[0], bits[1], bits[2]);
    match (
        session.state().property("epoch"),
        session.state().property("name"),
    ) {
        (Some(Property::Int(epoch)), Some(Property::Text(name))) => {
            println!("{} {epoch} {name}", session.input_names(Phase::Training)[1])
        }
        other => println!("{other:?}"),
    }
    if let Err(error) = session.step(&[x]) {
        println!("{error}");
    }
    session.freeze("v*")?;
    Ok(())
}

fn text<T>(result: Result<T, Error>) -> String {
    result
        .err()
        .map_or("no error".to_string(), |error| error.to_string())
}

fn more(path: &str, folder: &Path) -> Result<(), Error> {
    let (x, y) = (Tensor::new(&X, &[4, 2])?, Tensor::new(&Y, &[4, 1])?);
    let (file, checkpoint) = (folder.join("rust.state"), folder.join("rust.checkpoint"));
    let mut state = State::new()?;
    state.add("w", &Tensor::new(&[0f32, 0.], &[2, 1])?, true)?;
    state.set_property("rate", &Property::Float(0.5))?;
    state.save(&checkpoint, false)?;
    let bytes = std::fs::read(path).expect("the model");
    for run in 0..2 {
        let state = State::open(&file, Some(&checkpoint), 1)?;
        assert_eq!((state.step(), state.position()), (run, run));
        assert_eq!(state.property("rate"), Some(Property::Float(0.5)));
        assert!(text(State::open(&file, None, 1)).starts_with("STALE: "));
        let mut options = Options::new(Model::Bytes(&bytes));
        options.eval = Some(Model::path(path));
        options.optimizer = Some(Optimizer::adamw());
        let mut session = Session::open(state, &options)?;
        session.set_linear_schedule(0, 10, 0.5)?;
        let stop = AtomicI32::new(1);
        let stopped = session
            .run(Phase::Training, &[x, y], Some(&stop))
            .map(|_| ());
        assert!(text(stopped).starts_with("STALE: "));
        let loss = session.step(&[x, y])?[0].to_vec::<f32>()?;
        assert_eq!(session.eval_step(&[x, y])?[0].to_vec::<f32>()?, loss);
        assert!(session.state().parameter("w")?.gradient.is_some());
        session.optimizer_step()?;
        session.lazy_reset_grad();
        session.schedule_step()?;
        session.state_mut().set_position(run + 1);
        session.state_mut().commit()?;
        let w = session
            .close()
            .expect("its state")
            .parameter("w")?
            .values
            .map(|w| w.dims().to_vec());
        assert_eq!(w, Some(vec![2, 1]));
    }
    let mut session = open(State::load(&checkpoint)?, path)?;
    session.set_parameters(&[3., -1.], false)?;
    assert_eq!(
        session.state().parameters()[0]
            .values
            .expect("values")
            .to_vec::<f32>()?,
        [3., -1.]
    );
    session
        .state_mut()
        .write("w", &Tensor::new(&[1f32, 2.], &[2, 1])?)?;
    assert_eq!(session.parameters(true)?, [1., 2.]);
    assert!(text(session.export(folder.join("no.onnx"), &["loss"])).starts_with("UNSUPPORTED: "));
    assert!(text(session.state().parameter("v").map(|_| ())).contains("no parameter 'v'"));
    assert!(text(Tensor::new(&X, &[4, 3]).map(|_| ())).contains("8 elements for the shape [4, 3]"));
    assert!(text(x.to_vec::<i64>()).contains("elements of type 7 of a tensor of 1"));
    assert!(text(State::load("a\0b")).contains("a zero inside"));
    assert!(text(State::from_bytes(&[0; 10])).starts_with("MODEL: "));
    Ok(())
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words[0] == "sizes" {
        println!("{:?}", gradd_train::sizes());
        return;
    }
    if let Err(error) = train(&words[0]) {
        println!("{error}");
        assert_eq!(error.status, "TENSOR");
    }
    if let Some(folder) = words.get(1) {
        more(&words[0], Path::new(folder)).expect("all of it");
    }
}
