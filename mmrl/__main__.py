from mmrl.cli.main import main

main()
