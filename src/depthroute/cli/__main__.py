from depthroute.cli import main

main()
