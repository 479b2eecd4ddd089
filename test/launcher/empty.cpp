// The program that costs nothing.
int main() { return 0; }
