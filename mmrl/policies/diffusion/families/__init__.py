"""Model families that wrap diffusers pipelines. To add one, write a class here and add it to
`pipelines.CLASSES`, or write it elsewhere and name it in `model.family`."""
