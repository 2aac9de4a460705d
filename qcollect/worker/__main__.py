import sys

from qcollect.worker.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
