"""`python -m torch_ort.configure`: the step that built ORT's C++ extensions."""

if __name__ == "__main__":
    print("gradd: nothing needs configuring; wrap a module with ORTModule and train")
