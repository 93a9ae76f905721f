"""The models that these tests share stand beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
