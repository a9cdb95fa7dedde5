"""`python -m rollpacker` is the same as `rollpacker`."""

from rollpacker.cli.main import main

raise SystemExit(main())
