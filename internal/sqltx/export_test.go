package sqltx

// Classes are the classes of the error numbers that have one.
var Classes = classes
