"""`python -m ttp.launch` is `ttprun`."""

from ttp.launch.main import main

if __name__ == "__main__":
    main()
