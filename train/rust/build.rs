//! Says where libgradd_train.so is: in the folder that GRADD_TRAIN_LIB names, or where the linker
//! looks by itself.

fn main() {
    println!("cargo:rerun-if-env-changed=GRADD_TRAIN_LIB");
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(folder) = std::env::var("GRADD_TRAIN_LIB") {
        println!("cargo:rustc-link-search=native={folder}");
    }
    println!("cargo:rustc-link-lib=dylib=gradd_train");
}
