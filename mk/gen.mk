# Lists that are made from the sources, and the messages of ONNX. Each list is rewritten only when
# its content changed, so adding a file rebuilds what reads the list.

# Files of the page of `gradd web`, as texts of C.
WEB_PAGE := $(patsubst server/web/%,$(B)/gen/web_%.inc,$(wildcard server/web/page.*))
GEN := $(WEB_PAGE) \
       $(B)/gen/op_list.inc $(B)/gen/cpu_list.inc $(B)/gen/cuda_list.inc $(B)/gen/backend_list.inc \
       $(B)/gen/fake/backend_list.inc $(B)/gen/pass_list.inc $(B)/gen/placed_list.inc \
       $(B)/gen/cmd_list.inc $(B)/gen/test_list.inc $(B)/gen/flags.txt
put_list = @mkdir -p $(@D); { $(1); } > $@.new; \
           if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
stems    = $(sort $(basename $(notdir $(1))))
names    = :$(foreach n,$(1),; echo 'X($(n))')
scan_tests = sed -n -e 's/^TEST(\([a-z0-9_]*\)).*/X($(2), \1, 10)/p' \
             -e 's/^TEST_LIMIT(\([a-z0-9_]*\), *\([0-9]*\)).*/X($(2), \1, \2)/p' $(1)

$(B)/gen/web_%.inc: server/web/%
	@mkdir -p $(@D); sed 's/[\\"]/\\&/g; s/.*/"&\\n"/' $< >$@
$(B)/gen/op_list.inc: FORCE
	$(call put_list,$(call names,$(call stems,$(wildcard kernels/ops/*/*.c))))
BACKENDS = $(patsubst kernels/%/backend.c,%,$(sort $(wildcard kernels/*/backend.c)))
$(B)/gen/backend_list.inc: FORCE
	$(call put_list,$(call names,$(BACKENDS)))
$(B)/gen/fake/backend_list.inc: FORCE
	$(call put_list,$(call names,$(BACKENDS) fake emu))
$(B)/gen/cuda_list.inc: FORCE
	$(call put_list,$(call names,$(call stems,$(shell grep -l "^GRADD_KERNELS" $(CUDA_SRC)))))
# families with rows for the CPU: those of composites alone have none
$(B)/gen/cpu_list.inc: FORCE
	$(call put_list,$(call names,$(call stems,$(shell grep -l '^GRADD_KERNELS' kernels/ops/*/*.c))))
$(B)/gen/pass_list.inc: FORCE
	$(call put_list,$(call names,$(call stems,$(wildcard server/graph/passes/*.c))))
$(B)/gen/placed_list.inc: FORCE
	$(call put_list,$(call names,$(call stems,$(wildcard server/plan/passes/*.c))))
$(B)/gen/cmd_list.inc: FORCE
	$(call put_list,$(call names,$(patsubst cmd_%,%,$(call stems,$(wildcard server/*/cmd_*.c)))))
$(B)/gen/test_list.inc: FORCE
	$(call put_list,:$(foreach f,$(TEST_SRC),; $(call scan_tests,$(f),$(call test_name,$(f)))))
$(B)/gen/unit/%/test_list.inc: FORCE
	$(call put_list,$(call scan_tests,$(wildcard tests/c/*/test_$*.c),$*))
$(B)/gen/flags.txt: FORCE
	$(call put_list,echo '$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) $(CXX) $(CXXFLAGS_ALL)')
FORCE:

$(B)/gen/%.pb-c.c $(B)/gen/%.pb-c.h: %.proto
	@mkdir -p $(B)/gen; echo "  PROTO   $<"
	$(Q)protoc-c --c_out=$(B)/gen $<
