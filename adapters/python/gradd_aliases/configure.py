"""`python -m torch_ort.configure` and the like: the step that built ORT's C++ extensions."""


def build_torch_cpp_extensions() -> None:
    """Says that nothing is compiled."""
    print("gradd: nothing needs configuring or compiling; wrap a module with ORTModule and train")


if __name__ == "__main__":
    build_torch_cpp_extensions()
