"""`python -m torch_ort.configure` and the like: the step that built ORT's C++ extensions."""

if __name__ == "__main__":
    print("gradd: nothing needs configuring or compiling; wrap a module with ORTModule and train")
