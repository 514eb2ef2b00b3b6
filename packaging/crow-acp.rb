# A formula for a tap of our own. Homebrew's core wants a source archive for each dependency, and several of ours have
# none that builds without Rust; a tap may install what uv.lock names, with its hashes.
class CrowAcp < Formula
  desc "Coding agent in Python: ACP outside, MCP inside"
  homepage "https://github.com/odellus/crow"
  url "https://github.com/odellus/crow/archive/refs/tags/v0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000" # docs/releasing.md: known after the tag
  license "Apache-2.0"

  depends_on "uv" => :build
  depends_on "git"
  depends_on "python@3.13"

  def install
    ENV["UV_PROJECT_ENVIRONMENT"] = libexec.to_s
    system "uv", "sync", "--locked", "--no-dev", "--no-editable", "--python", Formula["python@3.13"].opt_bin/"python3.13"
    bin.install_symlink libexec/"bin/crow", libexec/"bin/crow-acp"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/crow --version")
    assert_match "Fixed", shell_output("#{bin}/crow demo")
  end
end
